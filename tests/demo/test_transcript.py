"""The transcript is readable in a file, and prints what models say as it is."""

from __future__ import annotations

import io

from rich.console import Console

from manylora.demo.client import Answer
from manylora.demo.transcript import Row, Transcript


def written(width: int = 120) -> tuple[Transcript, io.StringIO]:
    file = io.StringIO()
    return Transcript(Console(file=file, width=width)), file


def test_answers_with_brackets_are_no_markup() -> None:
    out, file = written()
    out.answers([Row("org/base", Answer("[bold]x[/nope]\n\ny", [1], [0.25, 1.5]), True)])
    text = file.getvalue()
    assert "[bold]x[/nope] y" in text
    assert "250 ms" in text and "1.50 s" in text and "yes" in text
    assert "org/" not in text


def test_a_difference_stands_out() -> None:
    out, file = written()
    out.answers([Row("json", Answer("{}", [1], [0.1]), False)])
    assert "NO" in file.getvalue()


def test_snippets_are_not_wrapped() -> None:
    out, file = written(width=20)
    out.code("curl", "word " * 20)
    assert "word " * 19 in file.getvalue()


def test_waiting_is_a_line_in_ten_seconds_in_a_file() -> None:
    out, file = written()
    with out.waiting("starting [x]") as update:
        for elapsed_s in (0.5, 9.5, 10.5, 15.0, 20.0, 21.0):
            update(elapsed_s, "loading [/weights]")
    assert file.getvalue().splitlines() == [
        "starting [x] …",
        "starting [x] … 10 s  loading [/weights]",
        "starting [x] … 21 s  loading [/weights]",
    ]
