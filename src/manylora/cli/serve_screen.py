"""What a person sees of `manylora serve`: a progress line while it starts, and a line for everything that happens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from manylora.cli.output import note, say

if TYPE_CHECKING:
    from rich.status import Status

PLAIN_PROGRESS_S = 10.0
"""Without a terminal, progress is one line in this time."""


class ServeScreen:
    """A `Listener` of the supervisor; progress and events go to stderr, the ready line to stdout."""

    def __init__(self, base_model: str, logs: Path, on_ready: Callable[[], None]) -> None:
        """`on_ready` runs once when the engine answers, before the ready line."""
        self._base_model = base_model
        self._logs = logs
        self._on_ready = on_ready
        self._status: Status | None = None
        self._next_line_at_s = 0.0

    def waiting(self, elapsed_s: float, engine_line: str) -> None:
        """Show how long it has taken and what the engine does."""
        text = f"starting {self._base_model} · {elapsed_s:.0f} s" + (f" · {engine_line}" if engine_line else "")
        if sys.stderr.isatty():
            self._show(text)
        elif elapsed_s >= self._next_line_at_s:
            self._next_line_at_s = elapsed_s + PLAIN_PROGRESS_S
            note(text)

    def ready(self, url: str, took_s: float) -> None:
        """The one line that tools may wait for."""
        self.clear()
        self._on_ready()
        say(f"ready: {url} serves {self._base_model} (started in {took_s:.0f} s)")
        note(f"logs: {self._logs}; stop with Ctrl-C")

    def died(self, child: str, how: str, retry_in_s: float) -> None:
        """A child is about to be started again."""
        self.clear()
        note(f"{child} {how}; starting it again in {retry_in_s:g} s (log: {self._logs / f'{child}.log'})")

    def back(self, child: str) -> None:
        """A child answers again."""
        note(f"{child} is back")

    def hanging(self, child: str) -> None:
        """A child is being killed because it no longer answers."""
        note(f"{child} does not answer; killing it")

    def stopping(self) -> None:
        """The orderly stop begins."""
        self.clear()
        note("stopping (once more to kill at once)")

    def clear(self) -> None:
        """Take the progress line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _show(self, text: str) -> None:
        from rich.console import Console
        from rich.markup import escape

        if self._status is None:
            self._status = Console(stderr=True, highlight=False).status(escape(text))
            self._status.start()
        else:
            self._status.update(escape(text))
