"""Lines between a worker and the agent: wherever they are split, and whatever else comes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.errors import (
    Conflict,
    CorruptBlob,
    InvalidAdapter,
    InvalidName,
    ManyloraError,
    NotFound,
    Unavailable,
)
from manylora.staging import protocol
from manylora.staging.layout import EXACT, EngineLayout, ModuleLayout, NameMap, Part
from manylora.staging.protocol import (
    Answer,
    Hello,
    Line,
    Refused,
    Release,
    Request,
    Stage,
    Staged,
    Welcome,
    raised,
    refusal,
)

DIGEST = "5a" * 32


def big_layout(modules: int = 2) -> EngineLayout:
    made = tuple(
        ModuleLayout(
            f"m.{at}.qkv", 8, (4, 2), False, (Part(f"m.{at}.q", 0, 2),), 8, (4, 2), None, (((0, 4),), ((1, 3),))
        )
        for at in range(modules)
    )
    return EngineLayout(EXACT, "float32", 0, 64, made, NameMap(prefixes=(("a", "b"),)), ("mtp.",))


REQUESTS: list[Request] = [Hello(big_layout()), Stage(DIGEST), Release(4096), Release(0), Stage("")]
ANSWERS: list[Answer] = [
    Welcome("5a5a", 1 << 40),
    Staged(8192, 1 << 33, "packed", 0.25),
    Refused("InvalidAdapter", "line\none \u2028 ü", "hint"),
    Refused("NotFound", ""),
]


@pytest.fixture
def ends() -> Iterator[tuple[Line, socket.socket]]:
    """A line, and the other end of it, raw."""
    mine, theirs = socket.socketpair()
    mine.settimeout(10)
    theirs.settimeout(10)
    line = Line(mine)
    yield line, theirs
    line.close()
    theirs.close()


@pytest.fixture
def lines() -> Iterator[tuple[Line, Line]]:
    mine, theirs = socket.socketpair()
    mine.settimeout(10)
    theirs.settimeout(10)
    pair = Line(mine), Line(theirs)
    yield pair
    for line in pair:
        line.close()


def test_records_arrive_as_they_were_sent(lines: tuple[Line, Line]) -> None:
    worker, agent = lines
    for request in REQUESTS:
        worker.send(request)
    assert [agent.receive(Request) for _ in REQUESTS] == REQUESTS
    for answer in ANSWERS:
        agent.send(answer)
    assert [worker.receive(Answer) for _ in ANSWERS] == ANSWERS


def send_all(connection: socket.socket, pieces: list[bytes]) -> None:
    for piece in pieces:
        connection.sendall(piece)


@given(st.data())
def test_lines_may_be_split_anywhere(data: Any) -> None:
    raw = b"".join(msgspec.json.encode(request) + b"\n" for request in REQUESTS)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=12)))
    mine, theirs = socket.socketpair()
    mine.settimeout(10)
    line = Line(mine)
    pieces = [raw[first:end] for first, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    sender = threading.Thread(target=send_all, args=(theirs, pieces))
    sender.start()
    assert [line.receive(Request) for _ in REQUESTS] == REQUESTS
    sender.join()
    theirs.close()
    assert line.receive(Request) is None
    line.close()


def test_a_byte_at_a_time(ends: tuple[Line, socket.socket]) -> None:
    line, other = ends
    raw = msgspec.json.encode(Stage(DIGEST)) + b"\n"
    sender = threading.Thread(target=send_all, args=(other, [bytes([byte]) for byte in raw]))
    sender.start()
    assert line.receive(Request) == Stage(DIGEST)
    sender.join()


def test_a_layout_of_megabytes(lines: tuple[Line, Line]) -> None:
    worker, agent = lines
    hello = Hello(big_layout(8000))
    sender = threading.Thread(target=worker.send, args=(hello,))
    sender.start()
    assert agent.receive(Request) == hello
    sender.join()


def test_the_end_is_none_even_within_a_line(ends: tuple[Line, socket.socket]) -> None:
    line, other = ends
    other.sendall(b'{"type":"Sta')
    other.close()
    assert line.receive(Request) is None


def test_a_descriptor_comes_with_its_record(lines: tuple[Line, Line]) -> None:
    worker, agent = lines
    read, write = os.pipe()
    agent.send(Welcome("a", 4096), write)
    assert worker.receive(Answer) == Welcome("a", 4096)
    received = worker.take_descriptor()
    assert received is not None
    assert worker.take_descriptor() is None
    os.write(received, b"hello")
    assert os.read(read, 5) == b"hello"
    for descriptor in (read, write, received):
        os.close(descriptor)


def test_a_descriptor_comes_with_a_record_that_is_split(lines: tuple[Line, Line]) -> None:
    """The first byte carries it, however many parts the rest comes in."""
    worker, agent = lines
    read, write = os.pipe()
    refused = Refused("InvalidAdapter", "x" * 3_000_000)
    sender = threading.Thread(target=agent.send, args=(refused, write))
    sender.start()
    assert worker.receive(Answer) == refused
    sender.join()
    received = worker.take_descriptor()
    assert received is not None
    for descriptor in (read, write, received):
        os.close(descriptor)


def test_descriptors_nobody_took_are_closed_with_the_line() -> None:
    mine, theirs = socket.socketpair()
    worker, agent = Line(mine), Line(theirs)
    read, write = os.pipe()
    for _ in range(3):
        agent.send(Welcome("a", 4096), write)
        worker.receive(Answer)
    os.close(write)
    worker.close()
    assert os.read(read, 1) == b"", "a copy of the pipe's end is still open"
    os.close(read)
    agent.close()


def test_lines_that_are_too_long(ends: tuple[Line, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_LINE_BYTES", 1 << 18)
    line, other = ends

    def send() -> None:
        with contextlib.suppress(OSError):
            other.sendall(b" " * (1 << 20))

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(ValueError, match="too long"):
        line.receive(Request)
    line.close()
    sender.join()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b" ",
        b"GET / HTTP/1.1\r",
        b"\x00\xff\xfe",
        b"{}",
        b"null",
        b"[]",
        b'"Stage"',
        b'{"type":"Nothing"}',
        b'{"type":"Stage"}',
        b'{"type":"Stage","digest":7}',
        b'{"type":"Stage","digest":"\xff"}',
        b'{"type":"Release","offset":"0"}',
        b'{"type":"Release","offset":1.5}',
        b'{"type":"Hello","layout":{}}',
        b'{"type":"Stage","x":' + b"[" * 60_000,
        msgspec.json.encode(Welcome("a", 1)),
        msgspec.json.encode(Stage(DIGEST)) * 2,
    ],
    ids=lambda garbage: garbage[:40].decode(errors="replace"),
)
def test_garbage_is_an_error_of_one_kind(ends: tuple[Line, socket.socket], garbage: bytes) -> None:
    line, other = ends
    other.sendall(garbage + b"\n")
    with pytest.raises(ValueError):
        line.receive(Request)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_an_error(raw: bytes) -> None:
    mine, theirs = socket.socketpair()
    line = Line(mine)
    theirs.sendall(raw)
    theirs.close()
    with contextlib.suppress(ValueError):
        while line.receive(Request) is not None:
            pass
    line.close()


@pytest.mark.parametrize("kind", [InvalidAdapter, CorruptBlob, NotFound, Unavailable])
def test_errors_keep_their_kind_on_the_other_side(kind: type[ManyloraError]) -> None:
    told = raised(refusal(kind("what", "hint")))
    assert type(told) is kind
    assert (told.message, told.hint) == ("what", "hint")


@pytest.mark.parametrize("error", [InvalidName("n"), Conflict("c"), KeyError("k"), MemoryError(), OSError(28, "full")])
def test_other_errors_may_be_gone_the_next_time(error: Exception) -> None:
    told = raised(refusal(error))
    assert type(told) is Unavailable
    assert told.message


def test_a_kind_that_is_not_known_is_unavailable() -> None:
    assert type(raised(Refused("Strange", "what"))) is Unavailable


@pytest.mark.parametrize("words", ["\ud800", "x" * 100_000_000, "\n\x00", "ü" * 1000])
def test_whatever_an_error_says_can_be_sent(lines: tuple[Line, Line], words: str) -> None:
    worker, agent = lines
    for error in (InvalidAdapter(words, words), KeyError(words)):
        agent.send(refusal(error))
        told = worker.receive(Answer)
        assert isinstance(told, Refused)
        assert 0 < len(told.reason) < 6 * 500
