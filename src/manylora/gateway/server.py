"""A gateway process: its socket, its server and its end. Knows nothing of requests."""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from manylora.errors import Unavailable
from manylora.gateway.app import GatewayApp, create_app
from manylora.registry.catalog import Catalog
from manylora.settings import Settings
from manylora.telemetry import fields
from manylora.tiers.disk import DiskTier

BACKLOG = 1024
# Requests that run get this long after SIGTERM, then an error; the rest of five seconds is for their last bytes.
GRACE_S = 3.5
HARD_STOP_S = 1
KEEP_ALIVE_S = 75
# A worker thread that has the answer to "did anything change" waits at most this long for the interpreter.
SWITCH_INTERVAL_S = 0.0005

logger = logging.getLogger(__name__)


class GatewayServer(uvicorn.Server):
    """uvicorn, with an end that tells the app and leaves the exit code to us."""

    def __init__(self, app: GatewayApp, *, grace_s: float = GRACE_S) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                log_level=logging.WARNING,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(grace_s) + HARD_STOP_S,
            )
        )
        self._app = app
        self._grace_s = grace_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What exists now stays: no collection needs to walk over it while requests wait.
        gc.collect()
        gc.freeze()
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            logger.info("listening", extra=fields(host=host, port=port))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._app.drain is not None:
            self._app.drain.begin(self._grace_s)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and SIGINT; unlike uvicorn's own, without raising the signal again at the end."""
        handled = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(settings: Settings, *, engine_socket: Path, base_model_name: str) -> int:
    """Serve until told to stop; returns the exit code. Raises `ManyloraError` if it cannot begin."""
    allow_many_connections()
    log_without_origins()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    catalog = Catalog.open(settings)
    try:
        disk_tier = DiskTier(settings.disk_tier)
        app = create_app(settings, catalog, disk_tier, engine_socket, base_model_name)
        with bind(settings.host, settings.port) as listener:
            GatewayServer(app).run(sockets=[listener])
        return 0
    finally:
        catalog.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises `Unavailable` naming the address."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {host}:{port}: {error.strerror or error}", "free the port, or give another one"
        ) from error


def log_without_origins() -> None:
    """Our lines name neither thread nor file, so nothing need look for them (see "Optimization" in logging's guide)."""
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def allow_many_connections() -> None:
    """Two descriptors a request: the usual soft limit of 1024 is too low for the requests that we admit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
