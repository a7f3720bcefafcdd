"""Reads one stream and prints when each token came. A process of its own, so that nothing else shares its interpreter.

Gets ``{"port", "key", "body"}`` on standard input; prints one monotonic time a line, which other processes share.
"""

from __future__ import annotations

import http.client
import json
import sys
import time


def watch(port: int, key: str, body: dict[str, object]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    while line := response.readline():
        if line.startswith(b"data: {"):
            print(time.monotonic(), flush=True)


if __name__ == "__main__":
    watch(**json.load(sys.stdin))
