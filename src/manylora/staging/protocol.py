"""What an engine's worker and the node's agent say to each other: one JSON record a line, over a Unix socket.

    worker → agent   Hello, once                      agent → worker   Welcome, with a descriptor of the shared memory
    worker → agent   Stage, then Release              agent → worker   Staged or Refused

A staged block belongs to the connection until it is released, or until the connection ends. An agent that starts anew
has new memory and another name; old descriptors stay what they were, and nobody writes there any more.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from manylora.errors import CorruptBlob, InvalidAdapter, ManyloraError, NotFound, Unavailable
from manylora.staging.layout import EngineLayout

MAX_LINE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 16
_REASON_CHARS = 500

Record = TypeVar("Record")


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Who asks, and the form that is wanted from now on."""

    layout: EngineLayout


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The agent's shared memory comes with this line, as a descriptor."""

    agent: str
    """A name of this life of the agent."""
    memory_bytes: int


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Bring the packed form of a version into shared memory, and keep it there."""

    digest: str


class Staged(msgspec.Struct, frozen=True, tag=True):
    """A block that belongs to this connection."""

    offset: int
    nbytes: int
    source: str
    """"host": it was there; "packed": read from a packed file; "folder": packed from the adapter's files."""
    seconds: float


class Release(msgspec.Struct, frozen=True, tag=True):
    """The block at `offset` is no longer needed."""

    offset: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why a version cannot be staged."""

    kind: str
    reason: str
    hint: str = ""


Request = Hello | Stage | Release
Answer = Welcome | Staged | Refused

_KINDS: Mapping[str, type[ManyloraError]] = {
    kind.__name__: kind for kind in (InvalidAdapter, CorruptBlob, NotFound, Unavailable)
}


def refusal(error: Exception) -> Refused:
    """An error as the other side is told of it."""
    if isinstance(error, ManyloraError):
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), Unavailable.__name__)
        return Refused(kind, _text(error.message), _text(error.hint))
    return Refused(Unavailable.__name__, _text(f"the agent failed: {type(error).__name__}: {error}"))


def _text(words: str) -> str:
    """What can be sent: names from an adapter's file may hold anything."""
    return words[:_REASON_CHARS].encode(errors="backslashreplace").decode()


def raised(refused: Refused) -> ManyloraError:
    """The error that a refusal stands for."""
    return _KINDS.get(refused.kind, Unavailable)(refused.reason, refused.hint)


class Line:
    """One end of a connection: sends and receives records, one a line. One thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = bytearray()
        self._descriptors: list[int] = []

    def send(self, record: Request | Answer, descriptor: int | None = None) -> None:
        """Send a record, and an open file with it."""
        data = msgspec.json.encode(record) + b"\n"
        if descriptor is None:
            self._socket.sendall(data)
            return
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        sent = self._socket.sendmsg([data], [rights])
        self._socket.sendall(data[sent:])

    def receive(self, kind: Any) -> Any:
        """The next record, one of `kind`; None where the other side has ended. `ValueError`: it is something else."""
        while b"\n" not in self._rest:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK_BYTES, 1)
            self._descriptors += descriptors
            if not data:
                return None
            self._rest += data
            if len(self._rest) > MAX_LINE_BYTES:
                raise ValueError("a line is too long")
        line, _, rest = bytes(self._rest).partition(b"\n")
        self._rest = bytearray(rest)
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"a line is no record: {error}") from error

    def take_descriptor(self) -> int | None:
        """An open file that came with the last record; the caller closes it."""
        return self._descriptors.pop() if self._descriptors else None

    def close(self) -> None:
        """End the connection."""
        for descriptor in self._descriptors:
            socket.close(descriptor)
        self._socket.close()
