"""How commands speak: data on stdout (text or JSON), everything else as single lines on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, NoReturn

import typer

from manylora.cli.exit_codes import ExitCode

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_WIDE_COLUMNS = 4096


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def say(line: str) -> None:
    """A line of result on stdout."""
    print(line, flush=True)


def note(line: str) -> None:
    """A line for the person on stderr, which no script should read."""
    print(line, file=sys.stderr, flush=True)


def warn(line: str) -> None:
    """A warning on stderr."""
    note(f"warning: {_one_line(line)}")


def complain(message: str, hint: str = "") -> None:
    """An error on stderr: one line, and one line with what to do."""
    note(f"error: {_one_line(message)}")
    if hint:
        note(f"hint: {_one_line(hint)}")


def leave(code: ExitCode) -> NoReturn:
    """End the command with an exit code after everything was said."""
    raise typer.Exit(code)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns on stdout; cut to the window on a terminal, whole elsewhere."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in header:
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE_COLUMNS)
    console.print(table)


def bytes_text(size: int) -> str:
    """A size as a person reads it."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def time_text(moment: datetime) -> str:
    """A time as ISO 8601 in UTC, to the second."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def percent_text(weight: float) -> str:
    """A share from 0 to 1 as percent."""
    return f"{weight * 100:g}%"


def _one_line(text: str) -> str:
    return " ".join(text.split())
