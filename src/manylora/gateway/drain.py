"""The end of the process as requests see it: no new ones, and a deadline for those that run."""

from __future__ import annotations

import asyncio


class Drain:
    """`begun` turns readiness off; when `deadline` is done, requests that still run are ended with an error.

    Belongs to the event loop in which it was made.
    """

    def __init__(self) -> None:
        self.begun = False
        self.deadline: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, grace_s: float) -> None:
        """Start the countdown; later calls change nothing."""
        if not self.begun:
            self.begun = True
            asyncio.get_running_loop().call_later(grace_s, self._end)

    def _end(self) -> None:
        if not self.deadline.done():
            self.deadline.set_result(None)
