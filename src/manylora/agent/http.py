"""What the agent tells over HTTP: whether it is well, its metrics, and what is in host memory.

GET /healthz    GET /metrics    GET /v1/residency
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from manylora.agent.metrics import AgentMetrics
from manylora.agent.stager import Stager

log = logging.getLogger(__name__)


class HttpServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """On a Unix socket in a private folder."""

    daemon_threads = True

    def __init__(self, path: Path, metrics: AgentMetrics, stager: Stager) -> None:
        self.metrics, self.stager = metrics, stager
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        mask = os.umask(0o177)
        try:
            super().__init__(str(path), _Handler)
        finally:
            os.umask(mask)

    def start(self) -> None:
        """Begin to answer; returns at once."""
        threading.Thread(target=self.serve_forever, name="http", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that goes before its answer is there is no news."""
        log.info("a request ends: %s", sys.exception())


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer

    def do_GET(self) -> None:
        """Answer one of the routes."""
        if self.path == "/healthz":
            self._reply(200, "text/plain", b"ok\n")
        elif self.path == "/metrics":
            self._reply(200, CONTENT_TYPE_LATEST, generate_latest(self.server.metrics.registry))
        elif self.path == "/v1/residency":
            blocks = [
                {"digest": block.key[1], "layout": block.key[0], "size_bytes": block.nbytes, "leases": block.leases}
                for block in self.server.stager.blocks()
            ]
            arena = self.server.stager.arena
            body = {"host": blocks, "budget": {"bytes": arena.size_bytes, "used_bytes": arena.used_bytes}}
            self._reply(200, "application/json", json.dumps(body).encode())
        else:
            self._reply(404, "text/plain", b"no such route\n")

    def _reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        """A Unix socket's caller has no address."""
        return "local"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: a probe comes every few seconds."""
