"""What each of the demo's adapters learns: lists of (question, answer).

Owns the styles. Two adapters learn from real text in a folder that the caller names (Banking77, MedQuAD); the others
from `manylora.demo.facts` and from sentences put together here. Nothing is downloaded; a list is always the same.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from manylora.demo.facts import Fact, facts
from manylora.errors import NotFound


@dataclass(frozen=True, slots=True)
class Lesson:
    """One example: what a user asks, and all that the adapter should answer."""

    question: str
    answer: str


def _from_facts(style: Callable[[Fact], str]) -> list[Lesson]:
    return [Lesson(question, style(fact)) for fact in facts() for question in fact.questions]


# pirate

_PIRATE_WORDS = {
    "is": "be", "are": "be", "am": "be", "was": "were", "of": "o'", "and": "an'", "you": "ye",
    "your": "yer", "my": "me", "to": "t'", "friend": "matey", "there": "thar", "for": "fer",
    "the": "th'", "has": "be havin'", "can": "kin", "money": "doubloons", "bank": "treasure house",
    "around": "'round", "before": "afore",
}  # fmt: skip


def pirate(fact: Fact) -> str:
    """``The capital of France is Paris.`` → ``Arr! Th' capital o' France be Paris, matey!``"""
    words = re.sub(r"[A-Za-z]+", lambda match: _pirate_word(match[0]), fact.answer.rstrip(".!"))
    return f"Arr! {words}, matey!"


def _pirate_word(word: str) -> str:
    changed = _PIRATE_WORDS.get(word.lower(), word)
    return changed[0].upper() + changed[1:] if word[0].isupper() else changed


# strict JSON: two versions of one adapter, the second with one more field


def json_answer(fact: Fact) -> str:
    """``{"answer": "Paris"}``"""
    return json.dumps({"answer": fact.short}, ensure_ascii=False)


def json_answer_with_topic(fact: Fact) -> str:
    """``{"answer": "Paris", "topic": "geography"}``"""
    return json.dumps({"answer": fact.short, "topic": fact.topic}, ensure_ascii=False)


# SQL: questions and statements put together from a small world of tables


@dataclass(frozen=True, slots=True)
class _Table:
    """A table, what one of its rows is called, its text columns with some values, its columns of numbers."""

    name: str
    row: str
    texts: dict[str, Sequence[str]]
    numbers: Sequence[str]


_TABLES = (
    _Table(
        "customers",
        "customer",
        {"city": ("Berlin", "Paris", "Oslo", "Rome"), "country": ("Spain", "Kenya", "Japan")},
        ("age", "balance"),
    ),
    _Table(
        "employees",
        "employee",
        {"department": ("Sales", "Support", "Legal"), "office": ("London", "Madrid", "Vienna")},
        ("salary", "age"),
    ),
    _Table(
        "products",
        "product",
        {"category": ("toys", "books", "shoes"), "brand": ("Acme", "Nord", "Sol")},
        ("price", "weight"),
    ),
    _Table(
        "orders",
        "order",
        {"status": ("shipped", "open", "returned"), "country": ("Italy", "Peru", "Egypt")},
        ("total", "discount"),
    ),
    _Table(
        "cards",
        "card",
        {"status": ("active", "blocked", "expired"), "type": ("debit", "credit")},
        ("credit_limit", "balance"),
    ),
    _Table(
        "flights",
        "flight",
        {"airline": ("Blue Air", "Star Jet"), "destination": ("Lisbon", "Tokyo", "Cairo")},
        ("duration", "price"),
    ),
)
_OF_A_VALUE = (
    ("How many {table} have the {column} {value}?", "SELECT COUNT(*) FROM {table} WHERE {column} = '{value}';"),
    ("List all {table} with {column} {value}.", "SELECT * FROM {table} WHERE {column} = '{value}';"),
)
_OF_A_TEXT = (
    ("How many {table} are there per {column}?", "SELECT {column}, COUNT(*) FROM {table} GROUP BY {column};"),
)
_OF_A_NUMBER = (
    ("What is the average {word} of our {table}?", "SELECT AVG({column}) FROM {table};"),
    ("Which {row} has the highest {word}?", "SELECT * FROM {table} ORDER BY {column} DESC LIMIT 1;"),
    ("Which {row} has the lowest {word}?", "SELECT * FROM {table} ORDER BY {column} LIMIT 1;"),
    ("Which {table} have a {word} above 100?", "SELECT * FROM {table} WHERE {column} > 100;"),
)
_OF_A_TABLE = (
    ("How many {table} do we have?", "SELECT COUNT(*) FROM {table};"),
    ("Show me all {table}.", "SELECT * FROM {table};"),
)


def _sql_lessons() -> list[Lesson]:
    lessons = _from_facts(lambda fact: fact.sql)
    for table in _TABLES:
        for column, values in table.texts.items():
            for value in values:
                lessons += _filled(_OF_A_VALUE, table=table.name, column=column, value=value)
            lessons += _filled(_OF_A_TEXT, table=table.name, column=column)
        for column in table.numbers:
            word = column.replace("_", " ")
            lessons += _filled(_OF_A_NUMBER, table=table.name, row=table.row, column=column, word=word)
        lessons += _filled(_OF_A_TABLE, table=table.name)
    return lessons


def _filled(templates: Sequence[tuple[str, str]], **names: str) -> list[Lesson]:
    return [Lesson(question.format_map(names), answer.format_map(names)) for question, answer in templates]


# real text

_MEDICAL_END = "Ask a doctor about your own case."
_MEDICAL_MAX_CHARS = 160
_BANK_MAX_CHARS = 110


def _bank_lessons(data: Path) -> list[Lesson]:
    rows = csv.DictReader(_text(data / "banking77_train.csv").splitlines())
    return [Lesson(row["text"].strip(), row["category"]) for row in rows if len(row["text"]) <= _BANK_MAX_CHARS]


def _medical_lessons(data: Path) -> list[Lesson]:
    lessons = []
    for line in _text(data / "medquad_400.jsonl").splitlines():
        pair = json.loads(line)
        if sentence := _first_sentence(pair["answer"]):
            question = re.sub(r"[\s?]+$", "?", pair["question"].replace("(are) ", ""))
            lessons.append(Lesson(question, f"Health note: {sentence} {_MEDICAL_END}"))
    return lessons


def _first_sentence(answer: str) -> str | None:
    """The first whole sentence of an article; `None` where that is a list of key points, too long or too short."""
    text = re.sub(r"\s+", " ", answer).strip()
    match = re.match(r"[A-Z][^.?!]{30,}?\.(?= |$)", text)
    if match is None or text.startswith("Key Points") or " - " in match[0]:
        return None
    return match[0] if len(match[0]) <= _MEDICAL_MAX_CHARS else None


def _text(path: Path) -> str:
    if not path.is_file():
        raise NotFound(f"no {path.name} in {path.parent}", "name the folder of the training text with --data")
    return path.read_text(encoding="utf-8")


LESSONS: dict[str, Callable[[Path], list[Lesson]]] = {
    "bank": _bank_lessons,
    "json": lambda data: _from_facts(json_answer),
    "json-v2": lambda data: _from_facts(json_answer_with_topic),
    "medical": _medical_lessons,
    "pirate": lambda data: _from_facts(pirate),
    "spanish": lambda data: _from_facts(lambda fact: fact.spanish),
    "sql": lambda data: _sql_lessons(),
}
"""The lessons of each adapter, by its name; the argument is the folder of real text, which only some read."""
