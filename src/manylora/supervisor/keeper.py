"""Keeps one child running: start, watch its health, start again after a pause, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import Protocol

from manylora.errors import Unavailable
from manylora.supervisor import child_log, guard, process_tree
from manylora.supervisor.child import Child, ChildSpec, describe_exit
from manylora.supervisor.restart import GiveUp, History, Life, RestartPolicy, after_death

PROBE_STARTING_S = 0.25
PROBE_HEALTHY_S = 5.0
SILENT_LIMIT_S = 30.0
"""A child that was healthy and then fails its probes for this long hangs: it is killed and started again."""

_SEARCHED_LINES = 400
_SHOWN_LINES = 20
_KILLED_STATUS = guard.SIGNAL_STATUS + signal.SIGKILL


class Listener(Protocol):
    """Who shows a person what happens. Calls come from the supervisor's event loop and must not block."""

    def waiting(self, elapsed_s: float, engine_line: str) -> None:
        """The engine is starting; several times a second."""

    def ready(self, url: str, took_s: float) -> None:
        """Everything answers for the first time."""

    def died(self, child: str, how: str, retry_in_s: float) -> None:
        """A child ended by itself and will be started again."""

    def back(self, child: str) -> None:
        """A child that had died is healthy again."""

    def hanging(self, child: str) -> None:
        """A child no longer answers and is being killed."""

    def stopping(self) -> None:
        """An orderly stop begins."""


class StartFailed(Unavailable):
    """A child ended before it was ever healthy; `lines` are the last of its log."""

    def __init__(self, message: str, hint: str, lines: list[str]) -> None:
        super().__init__(message, hint)
        self.lines = lines


def killed_hint(oom_kills_before: int | None) -> str:
    """What to do about a child that got SIGKILL; the kernel's own count tells whether memory was the reason."""
    oom_kills = process_tree.oom_kills()
    if oom_kills is None or oom_kills_before is None:
        return "something killed it, perhaps the system for lack of memory; its kernel log (dmesg) would say so"
    if oom_kills > oom_kills_before:
        return "the system had no memory left and killed it: free some, or try `-- --max-model-len N` with a smaller N"
    return (
        "the system did not kill it for lack of memory: look for who did, a person or a program that guards resources"
    )


class Keeper:
    """One child over all its lives."""

    def __init__(
        self,
        spec: ChildSpec,
        policy: RestartPolicy,
        listener: Listener,
        lock_fd: int,
        end_strays: Callable[[], None],
    ) -> None:
        """`end_strays` ends what is left below a guard that was itself killed; it may block."""
        self.spec = spec
        self.was_ready = asyncio.Event()
        self.child: Child | None = None
        self._policy = policy
        self._listener = listener
        self._lock_fd = lock_fd
        self._end_strays = end_strays
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Return after `stop`; raise `StartFailed` when the child ends before it was ever healthy."""
        history = History()
        while not self._stop.is_set():
            life, status = await self._live()
            if self._stop.is_set():
                return
            decision = after_death(self._policy, history, life)
            if isinstance(decision, GiveUp):
                raise self._start_failed(status)
            history = decision.history
            self._listener.died(self.spec.name, describe_exit(status), decision.delay_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), decision.delay_s)

    def last_log_line(self) -> str:
        """The newest meaningful line of the present life."""
        return child_log.last_meaningful_line(self.spec.log, since=self.child.log_start) if self.child else ""

    def stop(self) -> None:
        """Stop the child in order and start no other; returns at once."""
        self._stop.set()
        if self.child is not None:
            self.child.stop()

    def kill(self) -> None:
        """End the child and all below it at once, and start no other."""
        self._stop.set()
        if self.child is not None:
            self.child.kill()

    async def _live(self) -> tuple[Life, int]:
        """One life of the child, from start to the last of its descendants."""
        self.child = Child(self.spec, self._lock_fd)
        health = asyncio.ensure_future(_Health(self, self.child, self._listener).watch())
        try:
            status = await self.child.wait()
        finally:
            health.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await health
        if status < 0:
            await asyncio.to_thread(self._end_strays)
        return Life(self.child.healthy_at_s, time.monotonic()), status

    def _start_failed(self, status: int) -> StartFailed:
        assert self.child is not None
        lines = child_log.tail(self.spec.log, since=self.child.log_start, lines=_SEARCHED_LINES)
        cause = child_log.cause(lines)
        what = f"the {self.spec.name} {describe_exit(status)} while it was starting" + (f": {cause}" if cause else "")
        killed = status in (_KILLED_STATUS, -signal.SIGKILL)
        hint = killed_hint(self.child.oom_kills_before) if killed else child_log.hint_for(lines, self.spec.log)
        return StartFailed(what, hint, lines[-_SHOWN_LINES:])


class _Health:
    """Asks one life of a child how it is."""

    def __init__(self, keeper: Keeper, child: Child, listener: Listener) -> None:
        self._keeper = keeper
        self._child = child
        self._listener = listener

    async def watch(self) -> None:
        """Note when the child becomes healthy; kill it when it stays silent after that."""
        while not await self._child.spec.probe():  # noqa: ASYNC110 - another process has no event to wait for
            await asyncio.sleep(PROBE_STARTING_S)
        last_well_s = self._child.healthy_at_s = time.monotonic()
        if self._keeper.was_ready.is_set():
            self._listener.back(self._child.spec.name)
        self._keeper.was_ready.set()
        while time.monotonic() - last_well_s < SILENT_LIMIT_S:
            await asyncio.sleep(PROBE_HEALTHY_S)
            if await self._child.spec.probe():
                last_well_s = time.monotonic()
        self._listener.hanging(self._child.spec.name)
        self._child.kill()
