"""Connections to the engine, kept while they are fresh. Knows nothing of what goes over them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from manylora.gateway.engine_connection import ConnectionFailed, EngineConnection

CONNECT_TIMEOUT_S = 2.0
BACKLOG_RETRY_S = 0.01
# The engine closes idle connections after 5 s; ours go first, so that no request meets a connection being closed.
KEEP_ALIVE_S = 3.0


class Unreachable(ConnectionFailed):
    """Nobody listens at the engine's socket."""


class ConnectionPool:
    """As many connections as requests need: their number is bounded where requests are admitted, not here."""

    def __init__(self, path: Path, silence_timeout_s: float) -> None:
        self._path = str(path)
        self._silence_timeout_s = silence_timeout_s
        self._loop = asyncio.get_running_loop()
        self._open: set[EngineConnection] = set()
        self._idle: dict[EngineConnection, float] = {}
        """When each was given back, the oldest first."""
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def idle(self) -> EngineConnection | None:
        """The connection used last, if there is one that is surely open."""
        fresh_since = self._loop.time() - KEEP_ALIVE_S
        while self._idle:
            connection, since = self._idle.popitem()
            if since > fresh_since and connection.usable:
                return connection
            connection.close()
        return None

    async def connect(self) -> EngineConnection:
        """A new connection; raises `Unreachable`."""
        if self._closed:
            raise Unreachable
        connected = await self._connected()
        connection = await EngineConnection.open(connected, self._silence_timeout_s, self._forget)
        if not connection.closed:
            self._open.add(connection)
        return connection

    def give_back(self, connection: EngineConnection) -> None:
        """The request on it is over, at its end or before: then the connection is closed."""
        if connection.release() and not self._closed:
            self._idle[connection] = self._loop.time()
            if self._sweep is None:
                self._sweep = self._loop.call_later(KEEP_ALIVE_S, self._drop_stale)
        else:
            connection.close()

    def close(self) -> None:
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in tuple(self._open):
            connection.close()

    async def _connected(self) -> socket.socket:
        """A Unix socket is connected at once, or the other end has no room in its backlog for the moment."""
        deadline = self._loop.time() + CONNECT_TIMEOUT_S
        while True:
            try:
                made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            except OSError:
                raise Unreachable from None  # we have too many open files
            try:
                made.connect(self._path)
                return made
            except BlockingIOError:
                made.close()
                if self._loop.time() > deadline:
                    raise Unreachable from None
            except OSError:
                made.close()
                raise Unreachable from None
            await asyncio.sleep(BACKLOG_RETRY_S)

    def _forget(self, connection: EngineConnection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def _drop_stale(self) -> None:
        self._sweep = None
        now = self._loop.time()
        for connection, since in tuple(self._idle.items()):
            if since + KEEP_ALIVE_S > now:
                self._sweep = self._loop.call_later(since + KEEP_ALIVE_S - now, self._drop_stale)
                return
            del self._idle[connection]
            connection.close()
