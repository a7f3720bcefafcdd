"""The demo's acts, played against a running server: one batch, a push under traffic, a roll forward and back.

Owns what happens in which order and what is measured; every answer goes through the check. How the server came up is
`manylora.demo.run`'s matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from manylora.adapter import AdapterName
from manylora.demo import asks, base_model
from manylora.demo.asks import Ask, Check
from manylora.demo.client import Answer, Client
from manylora.demo.transcript import Row, Transcript
from manylora.registry.catalog import Catalog

ACTOR = "demo"
_TOKENS_BEFORE_PUSH = 24


@dataclass(frozen=True, slots=True)
class Stage:
    """What the acts need: the registry, a client, the adapters' folders, and where answers are checked and shown."""

    catalog: Catalog
    client: Client
    adapters: Path
    check: Check
    end_token: int
    transcript: Transcript

    async def push(self, folder: str, name: str) -> float:
        """Publish a folder as the next version of an adapter; returns the seconds that it took."""
        started = time.monotonic()
        await asyncio.to_thread(publish, self.catalog, self.adapters / folder, name)
        return time.monotonic() - started

    async def ask(self, ask: Ask) -> Row:
        """Ask, and check the answer."""
        return self.checked(ask, await self.client.ask(ask.model, ask.question, max_tokens=ask.max_tokens))

    def checked(self, ask: Ask, answer: Answer) -> Row:
        """The answer with its verdict."""
        return Row(ask.model, answer, self.check.same(ask, answer, end_token=self.end_token))

    async def ask_at_once(self, batch: Sequence[Ask]) -> None:
        """Ask everything at the same time, and show the answers."""
        self.transcript.question(batch[0].question, len(batch))
        started = time.monotonic()
        rows = await asyncio.gather(*(self.ask(ask) for ask in batch))
        took_s = time.monotonic() - started
        self.transcript.answers(rows)
        tokens = sum(len(row.answer.tokens) for row in rows)
        self.transcript.line(f"{tokens} tokens in {took_s:.2f} s, {tokens / took_s:.0f} a second over all streams")


def publish(catalog: Catalog, folder: Path, name: str) -> None:
    """What `manylora adapter push` does; the first version of an adapter becomes live by itself."""
    catalog.publish(folder, AdapterName(asks.TENANT, name), base_model=base_model.NAME, actor=ACTOR)


async def batch(stage: Stage) -> None:
    """Act 1: the base model and five adapters answer in one batch, twice."""
    stage.transcript.act("1. One question, six models, one batch")
    await stage.ask_at_once(asks.FIRST_BATCH)
    stage.transcript.line("")
    await stage.ask_at_once(asks.SECOND_BATCH)


async def live_push(stage: Stage) -> None:
    """Act 2: a sixth adapter is pushed and answers while a long stream of the base model runs."""
    out = stage.transcript
    out.act("2. A sixth adapter arrives while a stream runs")
    async with _long_stream(stage) as stream:
        out.command(f"manylora adapter push {_shown(stage, asks.SIXTH)} {asks.TENANT}/{asks.SIXTH}")
        push_s = await stage.push(asks.SIXTH, asks.SIXTH)
        row = await stage.ask(asks.TO_SIXTH)
        during = "" if not stream.done() else " (the stream had ended by then)"
        long_answer = await stream
    out.question(asks.TO_SIXTH.question, 1)
    out.answers([row, stage.checked(asks.LONG, long_answer)])
    out.line(
        f"push to first token: {push_s + row.answer.first_token_s:.2f} s, of which the push took {push_s:.2f} s{during}"
    )
    out.line(
        f"the running stream: {len(long_answer.tokens)} tokens, one every "
        f"{long_answer.median_gap_s() * 1000:.0f} ms (median), largest gap {max(long_answer.gaps_s()) * 1000:.0f} ms"
    )


@contextlib.asynccontextmanager
async def _long_stream(stage: Stage) -> AsyncIterator[asyncio.Task[Answer]]:
    """A long answer of the base model that is under way; ended with the block."""
    under_way = asyncio.Event()

    def watch(answer: Answer) -> None:
        if len(answer.tokens) >= _TOKENS_BEFORE_PUSH:
            under_way.set()

    ask = asks.LONG
    stream = asyncio.create_task(stage.client.ask(ask.model, ask.question, max_tokens=ask.max_tokens, on_chunk=watch))
    stream.add_done_callback(lambda _: under_way.set())
    try:
        await under_way.wait()
        yield stream
    finally:
        stream.cancel()


def _shown(stage: Stage, folder: str) -> str:
    return f"{stage.adapters.parent.name}/{stage.adapters.name}/{folder}"


async def roll(stage: Stage) -> None:
    """Act 3: a second version is pushed, tried by its number, promoted, and rolled back."""
    out = stage.transcript
    name = AdapterName(asks.TENANT, asks.ROLLED)
    out.act("3. A second version: pushed, promoted, rolled back")
    out.question(asks.TO_FIRST_VERSION.question, 1)
    out.command(f"manylora adapter push {_shown(stage, asks.SECOND_VERSION)} {name}")
    await stage.push(asks.SECOND_VERSION, asks.ROLLED)
    out.answers([await stage.ask(asks.TO_FIRST_VERSION), await stage.ask(asks.TO_PINNED_SECOND)])
    out.command(f"manylora adapter promote {name}@v2")
    promote_s = await _timed(lambda: stage.catalog.promote(name, 2, actor=ACTOR))
    out.answers([await stage.ask(asks.TO_SECOND_VERSION), await stage.ask(asks.TO_PINNED_FIRST)])
    out.command(f"manylora adapter rollback {name}")
    rollback_s = await _timed(lambda: stage.catalog.rollback(name, actor=ACTOR))
    out.answers([await stage.ask(asks.TO_FIRST_VERSION), await stage.ask(asks.TO_PINNED_SECOND)])
    out.line(f"promote took {promote_s * 1000:.0f} ms, rollback {rollback_s * 1000:.0f} ms; nothing was restarted")


async def _timed(act: Callable[[], object]) -> float:
    started = time.monotonic()
    await asyncio.to_thread(act)
    return time.monotonic() - started
