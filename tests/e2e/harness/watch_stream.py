"""Reads streams and prints when each token came. A process of its own, so that nothing else shares its interpreter.

Gets ``{"port", "key", "bodies"}`` on standard input; prints one line a token: the stream's number and a
monotonic time, which other processes share.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time


def watch(number: int, port: int, key: str, body: dict[str, object]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    while line := response.readline():
        if line.startswith(b"data: {"):
            sys.stdout.write(f"{number} {time.monotonic()}\n")
            sys.stdout.flush()


def watch_all(port: int, key: str, bodies: list[dict[str, object]]) -> None:
    threads = [threading.Thread(target=watch, args=(n, port, key, body)) for n, body in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    watch_all(**json.load(sys.stdin))
