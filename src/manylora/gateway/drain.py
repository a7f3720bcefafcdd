"""The end of the process as requests see it: no new ones, and a deadline for those that run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Drain:
    """`begun` turns readiness off; when `ended`, requests that still run are ended with an error.

    Belongs to the event loop in which it was made.
    """

    def __init__(self) -> None:
        self.begun = False
        self.ended = False
        self._running: set[Callable[[], None]] = set()

    def begin(self, grace_s: float) -> None:
        """Start the countdown; later calls change nothing."""
        if not self.begun:
            self.begun = True
            asyncio.get_running_loop().call_later(grace_s, self._end)

    def watch(self, at_end: Callable[[], None]) -> None:
        """Have `at_end` called at the deadline, unless `forget` comes first."""
        self._running.add(at_end)

    def forget(self, at_end: Callable[[], None]) -> None:
        self._running.discard(at_end)

    def _end(self) -> None:
        self.ended = True
        for at_end in tuple(self._running):
            at_end()
