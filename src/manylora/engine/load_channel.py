"""How the API server has workers load adapters: a socket of its own for each worker, past the step loop.

    API server → worker   Load                 "bring this version into adapter memory", or "how large would it be?"
    worker → API server   Outcome              once it is there (or known), or why it is not

One JSON record a line. vLLM's own calls to workers wait for a step to end, twice for each load. Only dropping an
adapter needs that order, and goes that way (`manylora.engine.worker_calls`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from manylora.errors import Unavailable

log = logging.getLogger(__name__)

READY, FULL, FAILED, MISSING = "ready", "full", "failed", "missing"
"""States of a load as a worker tells them; in `FULL` it keeps what it has, for another try; in `MISSING` the disk tier
has lost the version meanwhile."""

MEASURE = 0
"""The adapter id of a question that only asks for the size."""

PARALLEL_LOADS = 4
_BACKLOG = 8


class Load(msgspec.Struct, frozen=True):
    """A version to bring into memory, or to try again after `FULL`; with the id `MEASURE` only to be measured."""

    number: int
    """Of the question."""
    lora_id: int
    engine_name: str
    folder: str


class Outcome(msgspec.Struct, frozen=True):
    """What became of a load."""

    number: int
    state: str
    nbytes: int = 0
    seconds: float = 0.0
    source: str = ""
    unknown: tuple[str, ...] = ()
    reason: str = ""


Handle = Callable[[Load], Outcome]


class LoadServer:
    """A worker's end. `handle` runs in a few threads of its own, and does not raise."""

    def __init__(self, path: Path, handle: Handle, prepare_thread: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.connections = 0
        self._handle = handle
        self._pool = ThreadPoolExecutor(PARALLEL_LOADS, "manylora-load", initializer=prepare_thread)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(_BACKLOG)
        threading.Thread(target=self._accept, name="manylora-accept", daemon=True).start()

    def run(self, task: Callable[[], None]) -> None:
        """Run a task in one of the threads that load."""
        self._pool.submit(task)

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), name="manylora-loads", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        answering = threading.Lock()
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                try:
                    load = msgspec.json.decode(line, type=Load)
                except msgspec.MsgspecError as error:
                    log.warning("a line that is no load: %s", error)
                    return
                self._pool.submit(self._answer, connection, answering, load)

    def _answer(self, connection: socket.socket, answering: threading.Lock, load: Load) -> None:
        data = msgspec.json.encode(self._handle(load)) + b"\n"
        with answering, contextlib.suppress(OSError):  # whoever asked has gone: it drops the adapter
            connection.sendall(data)


class LoadClient:
    """The API server's end; connects with the first load, and anew after a break."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._last = 0
        self._connecting = asyncio.Lock()
        self._reader_task: asyncio.Task[None] | None = None

    async def load(self, lora_id: int, engine_name: str, folder: Path) -> Outcome:
        """Have the worker load; its word on it. Raises `Unavailable` where the worker does not answer."""
        writer = await self._connected()
        self._last += 1
        number = self._last
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            writer.write(msgspec.json.encode(Load(number, lora_id, engine_name, str(folder))) + b"\n")
            return await future
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """End the connection; loads that are under way fail."""
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.gather(self._reader_task, return_exceptions=True)

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:  # loads that come together share one connection
            return self._writer or await self._connect()

    async def _connect(self) -> asyncio.StreamWriter:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._path))
        except OSError as error:
            raise Unavailable(f"a worker of the engine does not take loads: {error.strerror}") from error
        self._writer = writer
        self._reader_task = asyncio.create_task(self._read(reader, writer), name="outcomes of loads")
        return writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        error: Exception = Unavailable("a worker of the engine has ended")
        try:
            while line := await reader.readline():
                outcome = msgspec.json.decode(line, type=Outcome)
                future = self._waiting.get(outcome.number)
                if future is not None and not future.done():
                    future.set_result(outcome)
        except (OSError, ValueError, msgspec.MsgspecError) as problem:
            error = Unavailable(f"a worker of the engine cannot be understood: {problem}")
        finally:
            if self._writer is writer:
                self._writer = None
            writer.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)


def socket_path(folder: Path, process: int) -> Path:
    """Where a worker listens. Sockets of workers that have ended are cleared away."""
    for old in folder.glob("w*.sock"):
        number = old.stem.removeprefix("w")
        if number.isdecimal() and not _is_alive(int(number)):
            old.unlink(missing_ok=True)
    return folder / f"w{process}.sock"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
