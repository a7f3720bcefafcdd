"""The folder of a running machine: its lock, its sockets, its logs. One supervisor at a time owns it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from manylora.errors import Conflict, InvalidSettings

SOCKET_PATH_MAX_BYTES = 107
"""Linux's limit on the path of a Unix socket."""
PREVIOUS_RUN_LIMIT_S = 12.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RunDir:
    """An owned run folder; `lock_fd` keeps it owned for as long as any process holds it open."""

    path: Path
    lock_fd: int

    @property
    def engine_socket(self) -> Path:
        """Where the engine listens."""
        return self.path / "engine.sock"

    @property
    def agent_socket(self) -> Path:
        """Where the agent listens for engines' workers."""
        return self.path / "agent.sock"

    @property
    def agent_http_socket(self) -> Path:
        """Where the agent tells how it is."""
        return self.path / "agent-http.sock"

    def log(self, child: str) -> Path:
        """Where a child's output goes."""
        return self.path / f"{child}.log"


@contextlib.contextmanager
def owned(path: Path, *, previous_run_limit_s: float = PREVIOUS_RUN_LIMIT_S) -> Iterator[RunDir]:
    """Make the folder (mode 0700) and own it; raise `Conflict` naming the process that owns it already."""
    _make(path)
    lock_fd = os.open(path / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(lock_fd, path, previous_run_limit_s)
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        yield RunDir(path, lock_fd)
    finally:
        os.close(lock_fd)


def _make(path: Path) -> None:
    run_dir = RunDir(path, -1)
    # A worker's own socket is named by its process; no name is longer than this one.
    size = len(os.fsencode(run_dir.agent_http_socket))
    if size > SOCKET_PATH_MAX_BYTES:
        raise InvalidSettings(
            f"the socket path {run_dir.agent_http_socket} has {size} bytes; the system allows {SOCKET_PATH_MAX_BYTES}",
            "set MANYLORA_RUN_DIR to a folder with a shorter path",
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise InvalidSettings(
            f"the run folder {path} cannot be used: {error.strerror}", "set MANYLORA_RUN_DIR or MANYLORA_HOME"
        ) from error


def _lock(lock_fd: int, path: Path, previous_run_limit_s: float) -> None:
    """Take the lock at once, or after the last processes of a supervisor that was killed have ended."""
    deadline_s = time.monotonic() + previous_run_limit_s
    while not _try_lock(lock_fd):
        owner = os.pread(lock_fd, 32, 0).decode(errors="replace").strip()
        if not owner.isdigit() or _is_alive(int(owner)):
            raise Conflict(
                f"another `manylora serve` (pid {owner or 'unknown'}) uses {path}",
                "stop it, or give this one its own --home",
            )
        if time.monotonic() >= deadline_s:
            raise Conflict(
                f"processes of an earlier `manylora serve` (pid {owner}) still hold {path}",
                "end them, or give this one its own --home",
            )
        time.sleep(_POLL_S)


def _try_lock(lock_fd: int) -> bool:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
