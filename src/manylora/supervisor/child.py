"""One run of a child process behind its guard, seen from the supervisor's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manylora.supervisor import child_log, guard, process_tree
from manylora.supervisor.health import Probe


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How a child is started, asked for its health and stopped."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment."""
    log: Path
    probe: Probe
    grace_s: float
    """How long it may take to end after SIGTERM."""
    socket: Path | None = None
    """A Unix socket that it makes; one left by an earlier run is removed before each start."""


def describe_exit(status: int) -> str:
    """How a child ended, in words; a negative status is the guard's own end."""
    if status < 0:
        return f"was ended together with its guard by signal {-status}"
    if status > guard.SIGNAL_STATUS:
        return f"was ended by signal {status - guard.SIGNAL_STATUS}"
    return f"ended with exit code {status}"


class Child:
    """A running child. The lifeline tells its guard to stop it, and that this process is still there."""

    def __init__(self, spec: ChildSpec, lock_fd: int) -> None:
        """Start it; the guard keeps `lock_fd` open until everything below it has ended."""
        self.spec = spec
        self.healthy_at_s: float | None = None
        self.oom_kills_before = process_tree.oom_kills()
        if spec.socket is not None:
            spec.socket.unlink(missing_ok=True)
        read_fd, self._lifeline_fd = os.pipe()
        self._orders_possible = True
        try:
            with child_log.open_log(spec.log) as log:
                self.log_start = log.seek(0, os.SEEK_END)
                self._guard = subprocess.Popen(  # noqa: S603 - the command is this program's own
                    [*_guard_argv(read_fd, lock_fd, spec.grace_s), *spec.argv],
                    env=dict(spec.env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(read_fd, lock_fd),
                    start_new_session=True,
                )
        finally:
            os.close(read_fd)
        self._exit = asyncio.ensure_future(self._wait())

    @property
    def guard_pid(self) -> int:
        """The process below which everything of this child lives."""
        return self._guard.pid

    async def wait(self) -> int:
        """The exit status: the command's own, or 128 + signal; negative when the guard itself was killed."""
        return await asyncio.shield(self._exit)

    def stop(self) -> None:
        """Ask it to end; after its grace the guard kills it."""
        self._order(guard.STOP)

    def kill(self) -> None:
        """End it and everything below it now."""
        self._order(guard.KILL)

    def _order(self, order: bytes) -> None:
        if self._orders_possible:
            with contextlib.suppress(BrokenPipeError):  # it has just ended
                os.write(self._lifeline_fd, order)

    async def _wait(self) -> int:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        pid_fd = os.pidfd_open(self._guard.pid)
        loop.add_reader(pid_fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pid_fd)
            os.close(pid_fd)
            self._orders_possible = False
            os.close(self._lifeline_fd)
        return self._guard.wait()


def _guard_argv(lifeline_fd: int, lock_fd: int, grace_s: float) -> list[str]:
    # -P: the working directory must not shadow modules.
    return [sys.executable, "-P", "-m", guard.__name__, str(lifeline_fd), str(lock_fd), str(grace_s), "--"]
