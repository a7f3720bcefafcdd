"""The client of the engine against a Unix socket whose other end misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from manylora.gateway import engine_client, engine_pool
from manylora.gateway.engine_client import EngineClient, read_answer
from manylora.gateway.engine_connection import MAX_HEAD_BYTES, PIECE_BYTES, EngineConnection
from manylora.gateway.metrics import GatewayMetrics
from manylora.gateway.problems import Refusal

PATH = "/v1/completions"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: Application/JSON; charset=utf-8\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
    b'2;name="a;b"\r\nhe\r\n3\r\nllo\r\n0\r\nx-trailer: 1\r\ncontent-type: x\r\n\r\n'
)
EVIL = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"

Behaviour = Callable[["Engine", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Engine:
    """The other end: what it does on every connection, and what it has seen."""

    behaviour: Behaviour
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    closed_by_us: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self.behaviour(self, reader, writer)
        with contextlib.suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    async def read(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        self.requests.append(head + await reader.readexactly(length))
        return self.requests[-1]


def says(*answers: bytes, end: bool = False, pause_s: float = 0.0) -> Behaviour:
    """Each request on a connection gets the next answer; after the last one it is kept open, or ended."""

    async def behaviour(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await engine.read(reader)
            writer.write(answer)
            await asyncio.sleep(pause_s)
        if not end:
            try:
                await reader.read(1)
            finally:
                engine.closed_by_us.set()

    return behaviour


@dataclass
class Bench:
    client: EngineClient
    engine: Engine
    metrics: GatewayMetrics

    async def ask(self, body: bytes = b"{}") -> bytes:
        async with self.client.post(PATH, body, [(b"x-request-id", b"1")]) as answer:
            return await read_answer(answer)

    def failures(self, reason: str) -> float:
        name = "manylora:gateway_engine_failures_total"
        return self.metrics.registry.get_sample_value(name, {"reason": reason}) or 0


@contextlib.asynccontextmanager
async def bench(folder: Path, behaviour: Behaviour, silence_s: float = 5.0) -> AsyncIterator[Bench]:
    metrics = GatewayMetrics()
    engine = Engine(behaviour)
    path = folder / "engine.sock"
    server = await asyncio.start_unix_server(engine.serve, path)
    client = EngineClient(path, silence_s, metrics)
    try:
        yield Bench(client, engine, metrics)
    finally:
        client.close()
        server.close()
        if engine.tasks:
            await asyncio.wait(engine.tasks, timeout=2)


async def refused(asked: Awaitable[Any]) -> tuple[int, str | None]:
    with pytest.raises(Refusal) as refusal:
        await asked
    return refusal.value.problem.status, refusal.value.problem.code


BROKEN = (503, "service_unavailable")


# ---- framing


@pytest.mark.parametrize("answer", [WHOLE, CHUNKED], ids=["length", "chunked"])
async def test_an_answer_split_in_every_place(tmp_path: Path, answer: bytes) -> None:
    async def behaviour(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for cut in range(len(answer)):
            await engine.read(reader)
            writer.write(answer[:cut])
            await asyncio.sleep(0.001)
            writer.write(answer[cut:])
        await reader.read()

    async with bench(tmp_path, behaviour) as it:
        for _ in range(len(answer)):
            assert await it.ask() == b"hello"
        assert it.engine.connections == 1


async def test_an_answer_byte_by_byte(tmp_path: Path) -> None:
    async def behaviour(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        for position in range(len(CHUNKED)):
            writer.write(CHUNKED[position : position + 1])
            await asyncio.sleep(0)
        await reader.read()

    async with bench(tmp_path, behaviour) as it:
        assert await it.ask() == b"hello"


async def test_the_request_as_the_engine_gets_it(tmp_path: Path) -> None:
    async with bench(tmp_path, says(WHOLE)) as it:
        async with it.client.post(PATH, b'{"a":1}', [(b"accept", b"*/*")]) as answer:
            assert (answer.status, answer.content_type) == (200, "Application/JSON; charset=utf-8")
            assert not answer.is_event_stream
        expected = b'POST /v1/completions HTTP/1.1\r\nhost: engine\r\naccept: */*\r\ncontent-length: 7\r\n\r\n{"a":1}'
        assert it.engine.requests == [expected]
        with pytest.raises(Refusal, match="cannot be passed on"):
            it.client.post(PATH, b"", [(b"accept", b"a\r\nx-tenant: globex")])


async def test_interim_answers_are_skipped(tmp_path: Path) -> None:
    interim = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\ncontent-type: text/event-stream\r\nlink: a\r\n\r\n"
    )
    async with bench(tmp_path, says(interim + WHOLE, interim + CHUNKED)) as it:
        assert [await it.ask(), await it.ask()] == [b"hello"] * 2
        assert it.engine.connections == 1


async def test_a_body_that_ends_with_the_connection(tmp_path: Path) -> None:
    async with bench(tmp_path, says(b"HTTP/1.1 200 OK\r\n\r\nhello", end=True)) as it:
        assert [await it.ask(), await it.ask()] == [b"hello"] * 2
        assert it.engine.connections == 2


async def test_an_answer_without_a_body(tmp_path: Path) -> None:
    nothing = b"HTTP/1.1 204 No Content\r\n\r\n"
    async with bench(tmp_path, says(nothing, WHOLE)) as it:
        assert [await it.ask(), await it.ask()] == [b"", b"hello"]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 4\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhelloX\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
async def test_an_answer_that_is_none(tmp_path: Path, answer: bytes) -> None:
    async with bench(tmp_path, says(answer, end=True, pause_s=0.01)) as it:
        assert await refused(it.ask()) == BROKEN
        assert it.failures("broke_off") == 1 and it.engine.connections == 1


@pytest.mark.parametrize(
    "flood",
    [
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 2 * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES,
        b"HTTP/1.1 100 Continue\r\n\r\n" * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"a" * 8 * MAX_HEAD_BYTES,
    ],
    ids=["one header", "many headers", "interim answers", "trailers", "a chunk's extension"],
)
async def test_a_head_without_end(tmp_path: Path, flood: bytes) -> None:
    async with bench(tmp_path, says(flood)) as it:
        assert await refused(asyncio.wait_for(it.ask(), 4)) == BROKEN
        await asyncio.wait_for(it.engine.closed_by_us.wait(), 2)


async def test_an_answer_larger_than_allowed(tmp_path: Path) -> None:
    announced = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n"
    chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n"
    for answer in (announced, chunks):
        async with bench(tmp_path, says(answer)) as it:

            async def ask(it: Bench = it) -> bytes:
                async with it.client.post(PATH, b"{}", []) as answer:
                    return await read_answer(answer, 1000)

            assert await refused(ask()) == (502, "bad_engine_answer")
            await asyncio.wait_for(it.engine.closed_by_us.wait(), 2)


# ---- connections kept


async def test_a_connection_is_used_again(tmp_path: Path) -> None:
    async with bench(tmp_path, says(*[WHOLE, CHUNKED] * 3)) as it:
        for _ in range(6):
            assert await it.ask() == b"hello"
        assert it.engine.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE.replace(b"content-length", b"connection: close\r\ncontent-length"),
        WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"),
        WHOLE + EVIL,
        WHOLE + b"HTTP/1.1 2",
        WHOLE + b"garbage",
    ],
    ids=["told so", "an old version", "two answers", "the start of another", "garbage behind"],
)
async def test_a_connection_that_must_not_be_used_again(tmp_path: Path, answer: bytes) -> None:
    async with bench(tmp_path, says(answer, EVIL)) as it:
        assert [await it.ask(), await it.ask()] == [b"hello"] * 2
        assert it.engine.connections == 2


async def test_what_comes_unasked_is_never_an_answer(tmp_path: Path) -> None:
    """In the very moment in which the next request goes out, before the event loop has seen it."""

    async def behaviour(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        writer.write(WHOLE)
        if engine.connections == 1:
            await asyncio.sleep(0.05)
            os.write(writer.get_extra_info("socket").fileno(), EVIL)
            again.set_result(await it.ask())
        await reader.read()

    again: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    async with bench(tmp_path, behaviour) as it:
        assert await it.ask() == b"hello"
        assert await asyncio.wait_for(again, 5) == b"hello"
        assert it.engine.connections == 2


async def test_a_stale_connection_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "KEEP_ALIVE_S", 0.05)
    async with bench(tmp_path, says(WHOLE)) as it:
        await it.ask()
        await asyncio.wait_for(it.engine.closed_by_us.wait(), 2)
        assert await it.ask() == b"hello" and it.engine.connections == 2


async def test_a_request_that_met_a_closing_connection_goes_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has closed, which we learn only from writing: it cannot have begun with what it did not read."""

    async def behaviour(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        writer.write(WHOLE)
        if engine.connections == 1:
            await asyncio.sleep(0.05)
            with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)
            again.set_result(await it.ask())
        await reader.read()

    monkeypatch.setattr(EngineConnection, "usable", True)
    again: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    async with bench(tmp_path, behaviour) as it:
        assert await it.ask() == b"hello"
        assert await asyncio.wait_for(again, 5) == b"hello"
        assert len(it.engine.requests) == 2 and it.failures("broke_off") == 0


async def test_a_request_that_was_read_does_not_go_out_again(tmp_path: Path) -> None:
    async def behaviour(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        writer.write(WHOLE)
        await engine.read(reader)

    async with bench(tmp_path, behaviour) as it:
        assert await it.ask() == b"hello"
        assert await refused(it.ask()) == BROKEN
        assert len(it.engine.requests) == 2 and it.engine.connections == 1


async def test_many_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path, says(*[CHUNKED] * 100, pause_s=0.001)) as it:
        for _ in range(3):
            assert await asyncio.gather(*(it.ask() for _ in range(50))) == [b"hello"] * 50
        assert it.engine.connections <= 50


# ---- time


async def test_silence_is_a_timeout_and_slowness_is_not(tmp_path: Path) -> None:
    async def behaviour(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        for position in range(0, len(WHOLE), 20):
            await asyncio.sleep(0.1)
            writer.write(WHOLE[position : position + 20])
        await engine.read(reader)
        await reader.read()
        engine.closed_by_us.set()

    async with bench(tmp_path, behaviour, silence_s=0.3) as it:
        assert await it.ask() == b"hello"
        started = time.monotonic()
        assert await refused(it.ask()) == (504, "engine_timeout")
        assert 0.25 < time.monotonic() - started < 1 and it.failures("silent") == 1
        await asyncio.wait_for(it.engine.closed_by_us.wait(), 2)


async def test_nobody_listens(tmp_path: Path) -> None:
    client = EngineClient(tmp_path / "none.sock", 1, GatewayMetrics())

    async def ask() -> None:
        async with client.post(PATH, b"", []):
            raise AssertionError

    assert await refused(ask()) == BROKEN
    assert await client.healthy() is False
    client.close()


async def test_probes_have_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "PROBE_TIMEOUT_S", 0.1)
    async with bench(tmp_path, says(b"")) as it:
        assert await it.client.healthy() is False
        assert it.failures("silent") == 0
        assert await refused(it.client.metrics_text()) == (504, "engine_timeout")


# ---- both directions


async def test_leaving_before_the_end_closes_the_connection(tmp_path: Path) -> None:
    async with bench(tmp_path, says(CHUNKED[:-30])) as it:
        async with it.client.post(PATH, b"{}", []) as answer:
            assert answer.is_event_stream
        await asyncio.wait_for(it.engine.closed_by_us.wait(), 2)
        asking = asyncio.ensure_future(it.ask())
        await asyncio.sleep(0.05)
        it.engine.closed_by_us.clear()
        asking.cancel()
        await asyncio.wait_for(it.engine.closed_by_us.wait(), 2)
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_slow_reader_slows_the_engine_down(tmp_path: Path) -> None:
    """And the time for which nothing is read is not the engine's silence."""
    size = 64 * 1024 * 1024
    written = 0

    async def behaviour(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await engine.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(b"x" * 65536)
            written += 65536
            await writer.drain()
        await reader.read()

    got = 0
    async with bench(tmp_path, behaviour, silence_s=0.4) as it:
        async with it.client.post(PATH, b"{}", []) as answer:
            await asyncio.sleep(0.2)

            async def slow() -> None:
                await asyncio.sleep(1)
                assert written < 4 * 1024 * 1024

            def take(piece: bytes) -> Any:
                nonlocal got
                first, got = got == 0, got + len(piece)
                return slow() if first else None

            await answer.each(take)
        assert got == size


async def test_an_error_of_the_reader_is_raised_where_it_reads(tmp_path: Path) -> None:
    def take(piece: bytes) -> None:
        raise ZeroDivisionError

    async def later(piece: bytes) -> None:
        raise ZeroDivisionError

    for reader in (take, later):
        async with bench(tmp_path, says(CHUNKED[:-30], pause_s=0.1)) as it:
            with pytest.raises(ZeroDivisionError):
                async with it.client.post(PATH, b"{}", []) as answer:
                    await answer.each(reader)
            await asyncio.wait_for(it.engine.closed_by_us.wait(), 2)


async def test_a_large_request_leaves_the_loop_its_time(tmp_path: Path) -> None:
    body = b"x" * (64 * PIECE_BYTES)
    async with bench(tmp_path, says(WHOLE, WHOLE)) as it:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.ensure_future(count())
        assert await it.ask(body) == b"hello"
        counting.cancel()
        assert turns > 64 and it.engine.requests[0].endswith(body)
        assert await it.ask() == b"hello" and it.engine.connections == 1


async def test_an_answer_before_the_request_is_read(tmp_path: Path) -> None:
    async def behaviour(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(WHOLE.replace(b"200 OK", b"413 No"))
        await asyncio.sleep(0.5)

    async with bench(tmp_path, behaviour) as it:
        for _ in range(2):
            async with it.client.post(PATH, b"x" * (64 * PIECE_BYTES), []) as answer:
                assert answer.status == 413 and await read_answer(answer) == b"hello"
        assert it.engine.connections == 2
