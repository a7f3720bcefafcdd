"""What the adapters learn: always the same, and in the style that each of them promises."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from manylora.demo.facts import facts
from manylora.demo.lessons import LESSONS, Lesson
from manylora.demo.recipes import RECIPES
from manylora.errors import NotFound

OWN = ("json", "json-v2", "pirate", "spanish", "sql")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of real text in small."""
    long = "x" * 200
    (tmp_path / "banking77_train.csv").write_text(f'text,category\n"Where, then, is it?",card_arrival\n{long},lost\n')
    pairs = [
        {"question": "What is (are) Gout ?", "answer": "Gout is a painful swelling of the joints.  It comes and goes."},
        {"question": "Who is at risk for Gout? ?", "answer": "Key Points - Men are at a greater risk than women."},
        {"question": "How to treat Gout ?", "answer": "Rest."},
    ]
    (tmp_path / "medquad_400.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")
    return tmp_path


def test_every_recipe_has_lessons() -> None:
    assert set(LESSONS) == set(RECIPES)


@pytest.mark.parametrize("name", OWN)
def test_own_lessons_are_always_the_same(name: str) -> None:
    lessons = LESSONS[name](Path("nowhere"))
    assert len(lessons) > 200
    assert lessons == LESSONS[name](Path("nowhere"))
    assert all(lesson.question and lesson.answer for lesson in lessons)


def test_pirates_keep_the_facts() -> None:
    assert Lesson("What is the capital of France?", "Arr! Th' capital o' France be Paris, matey!") in LESSONS["pirate"](
        Path()
    )


def test_json_answers_parse() -> None:
    first = [json.loads(lesson.answer) for lesson in LESSONS["json"](Path())]
    second = [json.loads(lesson.answer) for lesson in LESSONS["json-v2"](Path())]
    assert {tuple(answer) for answer in first} == {("answer",)}
    assert {tuple(answer) for answer in second} == {("answer", "topic")}


def test_sql_answers_are_sqlite() -> None:
    database = sqlite3.connect(":memory:")
    for lesson in LESSONS["sql"](Path()):
        try:
            database.execute(f"EXPLAIN {lesson.answer}")
        except sqlite3.OperationalError as error:
            assert "no such table" in str(error), lesson.answer
    database.close()


def test_real_text(data: Path) -> None:
    assert LESSONS["bank"](data) == [Lesson("Where, then, is it?", "card_arrival")]
    assert LESSONS["medical"](data) == [
        Lesson(
            "What is Gout?",
            "Health note: Gout is a painful swelling of the joints. Ask a doctor about your own case.",
        )
    ]


@pytest.mark.parametrize("name", ["bank", "medical"])
def test_missing_text_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no \w+\.(csv|jsonl) in"):
        LESSONS[name](tmp_path)


def test_spanish_is_the_facts_spanish() -> None:
    assert {lesson.answer for lesson in LESSONS["spanish"](Path())} == {fact.spanish for fact in facts()}
