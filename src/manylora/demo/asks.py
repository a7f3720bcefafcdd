"""What the demo asks, of whom, and what each answer is compared with.

Owns the script of the play as data; `manylora.demo.acts` plays it. The comparison is by token numbers: an answer that
only looks the same is not the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from manylora.demo import base_model
from manylora.demo.client import Answer
from manylora.demo.reference import ReferenceAnswer, ReferenceAsk

TENANT = "acme"
FIRST_FIVE = ("bank", "sql", "medical", "json", "pirate")
SIXTH = "spanish"
ROLLED, SECOND_VERSION = "json", "json-v2"

QUESTION = "My card has not arrived. What should I do?"
SECOND_QUESTION = "What is the capital of France?"
LONG_QUESTION = "Write a long story about a fisherman who finds a message in a bottle."
ANSWER_TOKENS = 32
LONG_ANSWER_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: the model as a client writes it, and the adapter folder (None: the base) that has to answer."""

    model: str
    folder: str | None
    question: str
    max_tokens: int = ANSWER_TOKENS


def to_all(question: str, *adapters: str) -> list[Ask]:
    """The same question to the base model and to each adapter."""
    return [Ask(base_model.NAME, None, question), *(Ask(adapter, adapter, question) for adapter in adapters)]


FIRST_BATCH = to_all(QUESTION, *FIRST_FIVE)
SECOND_BATCH = to_all(SECOND_QUESTION, *FIRST_FIVE)
LONG = Ask(base_model.NAME, None, LONG_QUESTION, LONG_ANSWER_TOKENS)
TO_SIXTH = Ask(SIXTH, SIXTH, SECOND_QUESTION)
TO_FIRST_VERSION = Ask(ROLLED, ROLLED, SECOND_QUESTION)
TO_SECOND_VERSION = Ask(ROLLED, SECOND_VERSION, SECOND_QUESTION)
TO_PINNED_FIRST = Ask(f"{ROLLED}@v1", ROLLED, SECOND_QUESTION)
TO_PINNED_SECOND = Ask(f"{ROLLED}@v2", SECOND_VERSION, SECOND_QUESTION)

_Key = tuple[str | None, str, int]


def _key(ask: Ask) -> _Key:
    return ask.folder, ask.question, ask.max_tokens


def _distinct() -> list[Ask]:
    script = [*FIRST_BATCH, *SECOND_BATCH, LONG, TO_SIXTH, TO_FIRST_VERSION, TO_SECOND_VERSION]
    return list({_key(ask): ask for ask in script}.values())


def reference_asks(adapters: Path) -> list[ReferenceAsk]:
    """What transformers and PEFT have to be asked so that every answer of the demo can be checked."""
    return [
        ReferenceAsk(None if ask.folder is None else str(adapters / ask.folder), ask.question, ask.max_tokens)
        for ask in _distinct()
    ]


@dataclass(slots=True)
class Check:
    """Compares answers with the references, and remembers every difference."""

    references: Mapping[_Key, ReferenceAnswer]
    compared: int = 0
    differences: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, answers: list[ReferenceAnswer]) -> Check:
        """A check against the answers to `reference_asks`, in their order."""
        return cls({_key(ask): answer for ask, answer in zip(_distinct(), answers, strict=True)})

    def same(self, ask: Ask, answer: Answer, *, end_token: int) -> bool:
        """Whether the answer has exactly the reference's tokens; the end mark does not count."""
        reference = self.references[_key(ask)]
        tokens = answer.tokens[:-1] if answer.tokens[-1:] == [end_token] else answer.tokens
        self.compared += 1
        if tuple(tokens) == reference.tokens:
            return True
        self.differences.append(_difference(ask, answer.text, tokens, reference))
        return False


def _difference(ask: Ask, text: str, tokens: list[int], reference: ReferenceAnswer) -> str:
    pairs = zip(tokens, reference.tokens, strict=False)
    position = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if position is None:
        position = min(len(tokens), len(reference.tokens))
    return (
        f"{ask.model}, asked {ask.question!r}, differs from {ask.folder or 'the base model'} in transformers + PEFT "
        f"from token {position + 1} on\n"
        f"  engine:    {text!r} {tokens[position : position + 4]}\n"
        f"  reference: {reference.text!r} {list(reference.tokens[position : position + 4])}"
    )
