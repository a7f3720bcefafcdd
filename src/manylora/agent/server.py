"""The agent's socket: one thread a connection, which is one thread of a worker that loads."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from manylora.agent.stager import Block, Stager
from manylora.staging.layout import EngineLayout
from manylora.staging.protocol import Hello, Line, Release, Request, Stage, Staged, Welcome, refusal

log = logging.getLogger(__name__)

_BACKLOG = 64
_PAUSE_S = 0.1


class AgentServer:
    """Listens until it is closed."""

    def __init__(self, path: Path, stager: Stager) -> None:
        self._stager = stager
        self._name = secrets.token_hex(8)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        mask = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(mask)
        self._socket.listen(_BACKLOG)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)

    def start(self) -> None:
        """Begin to accept; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Accept nobody else; connections end with the process."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("a worker cannot be met: %s", error)
                time.sleep(_PAUSE_S)  # out of descriptors, say: others end
                continue
            threading.Thread(target=self._serve, args=(connection,), name="worker", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        line = Line(connection)
        held: dict[int, Block] = {}
        try:
            self._answer_all(line, held)
        except (OSError, ValueError) as error:
            log.warning("a worker's connection ends: %s", error)
        finally:
            for block in held.values():
                self._stager.release(block)
            line.close()

    def _answer_all(self, line: Line, held: dict[int, Block]) -> None:
        hello = line.receive(Request)
        if not isinstance(hello, Hello):
            return
        line.send(Welcome(self._name, self._stager.arena.size_bytes), self._stager.arena.descriptor)
        while (request := line.receive(Request)) is not None:
            if isinstance(request, Stage):
                self._stage(line, request.digest, hello.layout, held)
            elif isinstance(request, Release):
                self._release(request.offset, held)
            else:
                raise ValueError("a worker says hello twice")

    def _release(self, offset: int, held: dict[int, Block]) -> None:
        block = held.pop(offset, None)
        if block is None:
            raise ValueError(f"a worker releases {offset}, which it does not hold")
        self._stager.release(block)

    def _stage(self, line: Line, digest: str, layout: EngineLayout, held: dict[int, Block]) -> None:
        started_s = time.monotonic()
        try:
            block, source = self._stager.stage(digest, layout)
        except Exception as error:  # whatever it was, it belongs to the one who asked
            log.warning("version %s cannot be staged: %s", digest[:16], error)
            line.send(refusal(error))
            return
        if block.offset in held:  # the same worker asked twice; one lease is enough
            self._stager.release(block)
        held[block.offset] = block
        line.send(Staged(block.offset, block.nbytes, source, time.monotonic() - started_s))
