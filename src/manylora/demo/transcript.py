"""The demo's transcript: everything that it prints, through Rich, readable in a terminal and in a log file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from manylora.demo.client import Answer

WIDTH_IN_A_FILE = 120
PLAIN_PROGRESS_S = 10.0
"""Without a terminal, waiting is told one line in this time."""
SHOWN_CHARS = 240
"""Of a long answer only the beginning is shown; all of it is compared."""


@dataclass(frozen=True, slots=True)
class Row:
    """One answer as it is shown: who was asked, what came, and whether it is the reference's."""

    model: str
    answer: Answer
    same: bool


def console() -> Console:
    """A console for the terminal; a fixed width where the output goes to a file."""
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH_IN_A_FILE)


class Transcript:
    """Writes the play down, act by act."""

    def __init__(self, out: Console) -> None:
        self._out = out

    def act(self, title: str) -> None:
        """The title of what follows."""
        self._out.print()
        self._out.rule(f"[bold]{escape(title)}[/bold]", align="left")

    def line(self, text: str) -> None:
        """A plain line; paths in it can be copied."""
        self._out.print(Text(text), soft_wrap=True)

    def command(self, text: str) -> None:
        """The command that does, in a shell, what the demo does now."""
        self._out.print(Text(f"$ {text}", style="cyan"))

    def code(self, title: str, text: str) -> None:
        """A snippet to copy: never wrapped."""
        self._out.print(Text(f"# {title}", style="dim"))
        self._out.print(Text(text), soft_wrap=True)

    def failure(self, text: str) -> None:
        """Something that makes the demo fail."""
        self._out.print(Text(text, style="bold red"))

    def question(self, text: str, asked: int) -> None:
        """The question of a batch."""
        to = "" if asked == 1 else f", asked of {asked} models at once"
        self._out.print(Text.assemble("Question", to, ": ", (text, "bold")))

    def answers(self, rows: Sequence[Row]) -> None:
        """A table of answers with their times."""
        table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, expand=True)
        table.add_column("model", style="bold", overflow="fold")
        table.add_column("answer", ratio=1)
        table.add_column("first token", justify="right", no_wrap=True)
        table.add_column("whole", justify="right", no_wrap=True)
        table.add_column("= PEFT", justify="center", no_wrap=True)
        for row in rows:
            mark = Text("yes", style="green") if row.same else Text("NO", style="bold red")
            table.add_row(
                Text(row.model.rpartition("/")[2]),
                Text(_beginning(" ".join(row.answer.text.split()))),
                f"{row.answer.first_token_s * 1000:.0f} ms",
                f"{row.answer.total_s:.2f} s",
                mark,
            )
        self._out.print(table)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[float, str], None]]:
        """A line that lives in a terminal while something starts; in a file, a line now and then."""
        if not self._out.is_terminal:
            yield self._plain_waiting(what)
            return
        with self._out.status(escape(what)) as status:

            def update(elapsed_s: float, detail: str) -> None:
                room = max(10, self._out.width - len(what) - 16)
                status.update(escape(f"{what} {elapsed_s:.0f} s  {detail[:room]}"))

            yield update

    def _plain_waiting(self, what: str) -> Callable[[float, str], None]:
        """Nobody sees a line change in a file: say what is waited for, and every ten seconds how it stands."""
        self.line(f"{what} …")
        next_line_at_s = PLAIN_PROGRESS_S

        def update(elapsed_s: float, detail: str) -> None:
            nonlocal next_line_at_s
            if elapsed_s >= next_line_at_s:
                next_line_at_s = elapsed_s + PLAIN_PROGRESS_S
                self.line(f"{what} … {elapsed_s:.0f} s  {detail}".rstrip())

        return update


def _beginning(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS].rstrip()} …"
