"""Health probes: a plain yes or no, whatever the other side does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from manylora.supervisor import health


async def answering(reply: bytes, socket: Path) -> asyncio.Server:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    return await asyncio.start_unix_server(handle, str(socket))


@pytest.mark.parametrize(
    ("reply", "well"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"", False),
        (b"nonsense\r\n", False),
        (b"x" * 100_000, False),
    ],
)
async def test_answers(tmp_path: Path, reply: bytes, well: bool) -> None:
    socket = tmp_path / "s"
    async with await answering(reply, socket):
        assert await health.unix_probe(socket, "/health")() is well


async def test_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_TIMEOUT_S", 0.05)
    socket = tmp_path / "s"

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(hang, str(socket)):
        assert not await health.unix_probe(socket, "/health")()


async def test_nobody_there(tmp_path: Path, unused_tcp_port_factory: Callable[[], int]) -> None:
    assert not await health.unix_probe(tmp_path / "none", "/health")()
    assert not await health.tcp_probe("127.0.0.1", unused_tcp_port_factory(), "/healthz")()


async def test_a_wildcard_address_is_asked_through_loopback(unused_tcp_port: int) -> None:
    async def well(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(well, "127.0.0.1", unused_tcp_port):
        assert await health.tcp_probe("0.0.0.0", unused_tcp_port, "/healthz")()
