"""Common knowledge, written for the demo's adapters: questions, an answer in English and Spanish, a short one, a topic.

Owns reading `facts.tsv`, which is only text. How an adapter puts an answer is the matter of `manylora.demo.lessons`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

_QUESTION_SEPARATOR = " / "


@dataclass(frozen=True, slots=True)
class Fact:
    """Ways to ask for one thing, with what is needed to answer in every style."""

    questions: tuple[str, ...]
    answer: str
    short: str
    topic: str
    spanish: str
    sql: str


def facts() -> list[Fact]:
    """Every fact, in the file's order."""
    lines = resources.files(__package__).joinpath("facts.tsv").read_text(encoding="utf-8").splitlines()
    return [_fact(line) for line in lines[1:]]


def _fact(line: str) -> Fact:
    questions, *rest = line.split("\t")
    return Fact(tuple(questions.split(_QUESTION_SEPARATOR)), *rest)
