"""The acts against a fake endpoint and a fake registry: what is pushed, promoted, asked, checked and shown."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from manylora.adapter import AdapterName
from manylora.demo import acts, asks, base_model
from manylora.demo.asks import Check
from manylora.demo.client import Answer
from manylora.demo.reference import ReferenceAnswer
from manylora.demo.transcript import Transcript
from manylora.registry.catalog import Catalog

END = 2


class FakeRegistry:
    """Versions as lists of folders; which number is live."""

    def __init__(self) -> None:
        self.folders: dict[str, list[str]] = {}
        self.live: dict[str, list[int]] = {}

    def publish(self, folder: Path, name: AdapterName, *, base_model: str, actor: str) -> None:
        assert name.tenant == asks.TENANT and actor
        self.folders.setdefault(name.name, []).append(folder.name)
        self.live.setdefault(name.name, [1])

    def promote(self, name: AdapterName, number: int, *, actor: str) -> None:
        self.live[name.name].append(number)

    def rollback(self, name: AdapterName, *, actor: str) -> int:
        self.live[name.name].pop()
        return self.live[name.name][-1]

    def folder(self, model: str) -> str | None:
        if model == base_model.NAME:
            return None
        name, _, number = model.partition("@v")
        return self.folders[name][(int(number) if number else self.live[name][-1]) - 1]


class FakeClient:
    """Answers with tokens that depend on the adapter and the question, as the references below do."""

    def __init__(self, registry: FakeRegistry, wrong: str = "") -> None:
        self.registry = registry
        self.wrong = wrong
        self.under_way = 0
        self.most_at_once = 0

    async def ask(
        self, model: str, question: str, *, max_tokens: int, on_chunk: Callable[[Answer], None] | None = None
    ) -> Answer:
        folder = self.registry.folder(model)
        answer = Answer(text=f"{folder} says")
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        for position, token in enumerate([*tokens(folder, question, max_tokens), END]):
            answer.tokens.append(token + (model == self.wrong))
            answer.chunk_times_s.append(0.01 * (position + 1))
            await asyncio.sleep(0)
            if on_chunk is not None:
                on_chunk(answer)
        self.under_way -= 1
        return answer


def tokens(folder: str | None, question: str, max_tokens: int) -> list[int]:
    first = sum(map(ord, f"{folder}{question}"))
    return [first + position for position in range(max_tokens)]


def stage(wrong: str = "") -> tuple[acts.Stage, FakeClient, io.StringIO]:
    adapters = Path("examples/adapters")
    registry = FakeRegistry()
    for name in asks.FIRST_FIVE:
        acts.publish(cast(Catalog, registry), adapters / name, name)
    references = [
        ReferenceAnswer(tuple(tokens(ask.adapter and Path(ask.adapter).name, ask.question, ask.max_tokens)), "said")
        for ask in asks.reference_asks(adapters)
    ]
    client, file = FakeClient(registry, wrong), io.StringIO()
    transcript = Transcript(Console(file=file, width=120))
    fakes: tuple[Any, Any] = registry, client
    return acts.Stage(fakes[0], fakes[1], adapters, Check.of(references), END, transcript), client, file


def play(the_stage: acts.Stage) -> None:
    async def all_acts() -> None:
        for act in (acts.batch, acts.live_push, acts.roll):
            await act(the_stage)

    asyncio.run(all_acts())


def test_the_whole_play() -> None:
    the_stage, client, file = stage()
    play(the_stage)
    assert the_stage.check.differences == []
    assert the_stage.check.compared == 6 + 6 + 2 + 6
    assert client.most_at_once == 6
    assert client.registry.folders[asks.SIXTH] == [asks.SIXTH]
    assert client.registry.live[asks.ROLLED] == [1]
    text = file.getvalue()
    for part in (
        "$ manylora adapter push examples/adapters/spanish acme/spanish",
        "push to first token",
        "largest gap",
    ):
        assert part in text
    assert "$ manylora adapter promote acme/json@v2" in text and "$ manylora adapter rollback acme/json" in text


@pytest.mark.parametrize(("wrong", "differences"), [("sql", 2), (f"{asks.ROLLED}@v2", 2), (asks.SIXTH, 1)])
def test_a_wrong_answer_is_noticed(wrong: str, differences: int) -> None:
    the_stage, _, file = stage(wrong)
    play(the_stage)
    assert len(the_stage.check.differences) == differences
    assert "NO" in file.getvalue()


def test_a_failing_push_ends_the_running_stream() -> None:
    the_stage, client, _ = stage()

    def publish(*args: object, **named: object) -> None:
        raise RuntimeError("refused")

    client.registry.publish = publish  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="refused"):
        asyncio.run(acts.live_push(the_stage))
