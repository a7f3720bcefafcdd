"""The table of facts: whole rows, and statements that SQLite can parse."""

from __future__ import annotations

import sqlite3

from manylora.demo.facts import facts


def test_every_row_is_whole() -> None:
    rows = facts()
    assert len(rows) > 140
    for fact in rows:
        assert all(fact.questions)
        assert fact.answer[0].isupper() and fact.answer[-1] in ".!?"
        assert fact.short and fact.topic
        assert fact.spanish[0].isupper() or fact.spanish[0] in "¿¡"
        assert fact.sql.endswith(";")


def test_a_question_is_asked_once() -> None:
    questions = [question for fact in facts() for question in fact.questions]
    assert len(questions) == len(set(questions))


def test_statements_parse() -> None:
    with sqlite3.connect(":memory:") as database:
        for fact in facts():
            try:
                database.execute(f"EXPLAIN {fact.sql}")
            except sqlite3.OperationalError as error:
                assert "no such table" in str(error), fact.sql
    database.close()
