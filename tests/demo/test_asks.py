"""The play's script, and the comparison with the references."""

from __future__ import annotations

from pathlib import Path

from manylora.demo import asks
from manylora.demo.asks import Ask, Check
from manylora.demo.client import Answer
from manylora.demo.reference import ReferenceAnswer

END = 2
ASK = asks.TO_SIXTH


def check(tokens: tuple[int, ...] = (5, 6, 7)) -> Check:
    references = asks.reference_asks(Path("adapters"))
    return Check.of([ReferenceAnswer(tokens, "reference") for _ in references])


def answer(*tokens: int) -> Answer:
    return Answer("engine", list(tokens), [0.1])


def test_every_ask_has_a_reference() -> None:
    references = check().references
    script = [*asks.FIRST_BATCH, *asks.SECOND_BATCH, asks.LONG, asks.TO_SIXTH, asks.TO_FIRST_VERSION]
    for ask in [*script, asks.TO_SECOND_VERSION, asks.TO_PINNED_FIRST, asks.TO_PINNED_SECOND]:
        assert (ask.folder, ask.question, ask.max_tokens) in references


def test_nothing_is_asked_of_the_reference_twice() -> None:
    references = asks.reference_asks(Path("adapters"))
    assert len(references) == len(set(references))


def test_the_end_mark_does_not_count() -> None:
    verdict = check()
    assert verdict.same(ASK, answer(5, 6, 7, END), end_token=END)
    assert verdict.same(ASK, answer(5, 6, 7), end_token=END)
    assert verdict.compared == 2 and verdict.differences == []


def test_a_difference_says_where() -> None:
    verdict = check()
    assert not verdict.same(ASK, answer(5, 9, 7, END), end_token=END)
    assert not verdict.same(ASK, answer(5, 6), end_token=END)
    first, second = verdict.differences
    assert "from token 2 on" in first and "[9, 7]" in first and "[6, 7]" in first
    assert "from token 3 on" in second


def test_the_same_text_of_another_adapter_is_another_reference() -> None:
    first, second = asks.TO_FIRST_VERSION, asks.TO_SECOND_VERSION
    assert first.model == second.model
    assert isinstance(first, Ask) and first.folder != second.folder
