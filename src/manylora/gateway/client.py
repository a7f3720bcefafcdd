"""The client's departure, and the end of the process: what may interrupt a request. Knows nothing of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive

from manylora.gateway.drain import Drain
from manylora.gateway.problems import Refusal, unavailable


class ClientGone(Exception):
    """The client closed its connection before its request was answered: no error, and nobody to tell."""


async def run_for_client(work: Coroutine[None, None, None], receive: Receive, drain: Drain) -> None:
    """Run `work` until it ends, the client leaves (`ClientGone`) or the process has no more time (`Refusal`).

    In the last two cases the work is cancelled, and with it the engine's part of the request.
    """
    if drain.ended:
        work.close()
        raise _no_more_time()
    interruption = _Interruption()
    gone = asyncio.get_running_loop().create_task(_departure(receive))
    gone.add_done_callback(interruption.client_left)
    drain.watch(interruption.time_is_up)
    try:
        await work
    except asyncio.CancelledError:
        reason = interruption.reason
        if reason is None or interruption.cancelled_by_others():
            raise
        raise reason from None
    finally:
        drain.forget(interruption.time_is_up)
        interruption.disarm()
        gone.cancel()


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Interruption:
    """Cancels the task in which it was made, at most once, and remembers why."""

    __slots__ = ("_armed", "_cancelling", "_task", "reason", "time_is_up")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._armed = True
        self.reason: Exception | None = None
        self.time_is_up = self._time_is_up
        """The same object each time, so that it can be taken out of a set."""

    def client_left(self, gone: asyncio.Task[None]) -> None:
        if self._armed and not gone.cancelled():
            gone.exception()  # a connection that cannot be read is gone as well
            self._interrupt(ClientGone("the client left before its answer was complete"))

    def _time_is_up(self) -> None:
        if self._armed:
            self._interrupt(_no_more_time())

    def cancelled_by_others(self) -> bool:
        return self._task.cancelling() > self._cancelling + 1

    def disarm(self) -> None:
        """The work has ended; a cancellation of ours counts no longer."""
        self._armed = False
        if self.reason is not None:
            self._task.uncancel()

    def _interrupt(self, reason: Exception) -> None:
        if self.reason is None:
            self.reason = reason
            self._task.cancel()


def _no_more_time() -> Refusal:
    return Refusal(unavailable("The gateway is shutting down."))
