"""One machine's processes as a whole, from start to stop, and the signals that a person sends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass, field

from manylora.supervisor import process_tree
from manylora.supervisor.child import ChildSpec
from manylora.supervisor.keeper import Keeper, Listener
from manylora.supervisor.restart import RestartPolicy

STOP_LIMIT_S = 9.0
"""From the signal to the moment when everything that is left is killed."""
_KILL_LIMIT_S = 1.5
_TICK_S = 0.25
INTERRUPTED_STATUS = 130


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs on this machine."""

    engine: ChildSpec
    gateway: ChildSpec
    url: str
    agent: ChildSpec | None = None
    """Without one the engine's workers pack adapters themselves."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)


def run(plan: Plan, listener: Listener, lock_fd: int) -> int:
    """Run until a signal; returns the exit status: 130 after SIGINT, 0 after SIGTERM.

    Raises `StartFailed` when a child ends before it was ever healthy. No process is left in any case.
    """
    process_tree.adopt_orphans()
    return asyncio.run(_Machine(plan, listener, lock_fd).run())


class _Machine:
    def __init__(self, plan: Plan, listener: Listener, lock_fd: int) -> None:
        self._plan = plan
        self._listener = listener
        self._engine = Keeper(plan.engine, plan.restart, listener, lock_fd, self._end_strays)
        self._gateway = Keeper(plan.gateway, plan.restart, listener, lock_fd, self._end_strays)
        self._keepers = [self._gateway, self._engine]
        if plan.agent is not None:
            self._keepers.append(Keeper(plan.agent, plan.restart, listener, lock_fd, self._end_strays))
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        self._install_signals()
        running = [asyncio.ensure_future(keeper.run()) for keeper in self._keepers]
        announcing = asyncio.ensure_future(self._announce())
        try:
            await asyncio.wait([*running, announcing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            announcing.cancel()
            await self._stop(running)
        for task in [*running, announcing]:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return self._status

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_signal, INTERRUPTED_STATUS)
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, 0)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, 0)

    def _on_signal(self, status: int) -> None:
        if self._asked.is_set():
            self._hurried.set()
        else:
            self._status = status
            self._asked.set()

    async def _announce(self) -> None:
        """Show the start until all children have been healthy; return when a person asks for the end."""
        started_s = time.monotonic()
        while not all(keeper.was_ready.is_set() for keeper in self._keepers):
            self._listener.waiting(time.monotonic() - started_s, self._engine.last_log_line())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), _TICK_S)
                return
        self._listener.ready(self._plan.url, time.monotonic() - started_s)
        await self._asked.wait()

    async def _stop(self, running: list[asyncio.Task[None]]) -> None:
        """Gateway first, so that it can finish answers; then engine and agent; then whatever is left, by force."""
        self._listener.stopping()
        hurried = asyncio.ensure_future(self._hurried.wait())
        stopping = asyncio.ensure_future(self._stop_in_order(running))
        await asyncio.wait([hurried, stopping], timeout=STOP_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        stopping.cancel()
        for keeper in self._keepers:
            keeper.kill()
        await asyncio.wait(running, timeout=_KILL_LIMIT_S)
        process_tree.end_descendants(polite_s=0.0, limit_s=_KILL_LIMIT_S)

    async def _stop_in_order(self, running: list[asyncio.Task[None]]) -> None:
        for keeper, task in zip(self._keepers, running, strict=True):
            keeper.stop()
            await asyncio.wait([task])

    def _end_strays(self) -> None:
        """End what a killed guard left behind; the subtrees of living guards are spared."""
        guards = [keeper.child.guard_pid for keeper in self._keepers if keeper.child is not None]
        process_tree.end_descendants(polite_s=0.0, limit_s=5.0, without=guards)
