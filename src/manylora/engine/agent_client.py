"""A worker's side of the node's agent: staged adapters, seen where the agent keeps them.

Threads that load have a connection each, so that a long pack keeps no other load waiting. An agent that has died is
found again by the next load; what was mapped from its memory stays readable until the last user is done.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manylora.errors import CorruptBlob, Unavailable
from manylora.staging.layout import EngineLayout
from manylora.staging.packed_form import PackedHeader, read_header
from manylora.staging.protocol import Answer, Hello, Line, Refused, Release, Stage, Staged, Welcome, raised

log = logging.getLogger(__name__)

ANSWER_S = 120.0
RECONNECT_S = 3.0
_PAUSE_S = 0.05

OnMap = Callable[[mmap.mmap], None]
"""Told of the agent's memory when it is mapped, to pin it, say."""


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """A packed adapter in the agent's memory, held there until its context ends."""

    block: memoryview
    header: PackedHeader
    source: str


@dataclass(slots=True)
class _Connection:
    line: Line
    memory: memoryview


class AgentClient:
    """Safe for any number of threads."""

    def __init__(self, path: Path, layout: EngineLayout, on_map: OnMap = lambda _: None) -> None:
        self._path, self._layout, self._on_map = path, layout, on_map
        self._key = layout.key
        self._idle: list[_Connection] = []
        self._mapped: tuple[str, mmap.mmap] | None = None
        self._lock = threading.Lock()

    @contextmanager
    def staged(self, digest: str) -> Iterator[StagedAdapter]:
        """The packed form of a version, for the length of the block.

        Raises what is wrong with the version, or `Unavailable` where no agent answers; and `CorruptBlob` at the end if
        the memory turned out to have become another's meanwhile: then whatever was read is to be thrown away.
        """
        connection, answer = self._ask(digest)
        try:
            block = connection.memory[answer.offset : answer.offset + answer.nbytes]
            header = self._checked(block, digest)
            yield StagedAdapter(block, header, answer.source)
            self._checked(block, digest)
        except BaseException:
            connection.line.close()
            raise
        self._release(connection, answer.offset)

    def warm(self) -> None:
        """Connect, and map the agent's memory, before the first load."""
        connection = self._connect()
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """End idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.line.close()

    def _release(self, connection: _Connection, offset: int) -> None:
        try:
            connection.line.send(Release(offset))
        except OSError:  # the agent has died, and its leases with it; what was read is as good as before
            connection.line.close()
            return
        with self._lock:
            self._idle.append(connection)

    def _checked(self, block: memoryview, digest: str) -> PackedHeader:
        header = read_header(block)
        if (header.digest, header.layout) != (digest, self._key):
            raise CorruptBlob(f"the memory of version {digest[:16]} holds another's")
        return header

    def _ask(self, digest: str) -> tuple[_Connection, Staged]:
        """Ask an agent that answers: one that died since the last load is replaced within seconds."""
        deadline_s = time.monotonic() + RECONNECT_S
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            connection = connection or self._connect(deadline_s)
            try:
                connection.line.send(Stage(digest))
                answer = connection.line.receive(Answer)
            except (OSError, ValueError) as error:
                connection.line.close()
                if isinstance(error, TimeoutError):
                    raise Unavailable(f"the agent has not staged the version within {ANSWER_S:g} s") from error
                answer = None
            if isinstance(answer, Staged):
                return connection, answer
            if isinstance(answer, Refused):
                with self._lock:
                    self._idle.append(connection)
                raise raised(answer)
            connection.line.close()
            if time.monotonic() > deadline_s:
                raise Unavailable("the node's agent ends before it answers", "look into its log")
            time.sleep(_PAUSE_S)

    def _connect(self, deadline_s: float | None = None) -> _Connection:
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(ANSWER_S)
            line = Line(connection)
            try:
                connection.connect(str(self._path))
                return self._greeted(line)
            except (OSError, ValueError) as error:
                line.close()
                if deadline_s is None or time.monotonic() > deadline_s:
                    raise Unavailable(f"the node's agent does not answer: {error}", "look into its log") from error
            time.sleep(_PAUSE_S)

    def _greeted(self, line: Line) -> _Connection:
        line.send(Hello(self._layout))
        welcome = line.receive(Answer)
        descriptor = line.take_descriptor()
        if not isinstance(welcome, Welcome) or descriptor is None:
            raise ValueError("the agent did not say welcome")
        try:
            return _Connection(line, memoryview(self._memory_of(welcome, descriptor)))
        finally:
            os.close(descriptor)

    def _memory_of(self, welcome: Welcome, descriptor: int) -> mmap.mmap:
        """The agent's memory, mapped once for each of its lives."""
        with self._lock:
            if self._mapped is None or self._mapped[0] != welcome.agent:
                memory = mmap.mmap(descriptor, welcome.memory_bytes)
                with contextlib.suppress(OSError):
                    memory.madvise(mmap.MADV_HUGEPAGE)
                self._mapped = (welcome.agent, memory)
                try:
                    self._on_map(memory)
                except Exception:
                    log.exception("the agent's memory cannot be prepared: copies from it are slower")
            return self._mapped[1]
