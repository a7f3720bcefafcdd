"""One question to a child over HTTP: is it well? Any failure is a plain no; the caller decides what a no means."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

Probe = Callable[[], Awaitable[bool]]
_TIMEOUT_S = 5.0
_STATUS_LINE_MAX_BYTES = 1024


def unix_probe(socket: Path, route: str) -> Probe:
    """Ask over a Unix socket."""
    return lambda: _is_well(lambda: asyncio.open_unix_connection(str(socket), limit=_STATUS_LINE_MAX_BYTES), route)


def tcp_probe(host: str, port: int, route: str) -> Probe:
    """Ask over TCP; a wildcard address is asked through loopback."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104
    return lambda: _is_well(lambda: asyncio.open_connection(reachable, port, limit=_STATUS_LINE_MAX_BYTES), route)


_Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def _is_well(connect: _Connect, route: str) -> bool:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await _ask(connect, route)
    except (OSError, TimeoutError, ValueError):  # ValueError: an endless status line
        return False


async def _ask(connect: _Connect, route: str) -> bool:
    reader, writer = await connect()
    try:
        writer.write(f"GET {route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        status = (await reader.readline()).split()
        return len(status) >= 2 and status[1] == b"200"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
