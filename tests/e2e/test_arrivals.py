"""New adapters arrive all the time: the streams of others keep their pace."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import processes, recipes
from harness.asking import ask_right, async_client, question
from harness.crowd import variant
from harness.stack import TENANT, Stack
from harness.token_watch import TokenWatch, stream_body
from harness.zoo import Zoo

HOT = ("r4", "r32", "rslora", "all-linear")
STREAMS = 8
STREAM_TOKENS = 1990
"""What the model's context holds; streams that end are begun anew."""

ARRIVAL_S = 0.2
PHASE_S = 60.0
GAP_LIMIT = 1.25
QUIET_SHARE = 0.1


async def test_streams_keep_their_pace_while_adapters_arrive(
    stack: Stack, zoo: Zoo, tmp_path: Path, record_figures: Callable[[str, object], None]
) -> None:
    """Eight streams on four adapters; for a minute a version that no tier has seen is asked for every 200 ms."""
    for name in HOT:
        stack.publish(name)
    count = int(PHASE_S / ARRIVAL_S)
    arriving = [recipes.FLEET[number % len(recipes.FLEET)].name for number in range(count)]
    for number, name in enumerate(arriving):
        stack.publish_folder(variant(zoo, name, number, tmp_path), f"{TENANT}/arrival-{number}")
    busy = processes.busy_share(2.0)
    bodies = [
        stream_body(question(HOT[number % len(HOT)], zoo.group("short")[0]), STREAM_TOKENS) for number in range(STREAMS)
    ]
    quiet: list[float] = []
    among: list[float] = []
    waits: list[float] = []
    async with async_client(stack) as client:
        arrivals = iter(enumerate(arriving))
        while len(waits) < count:
            async with TokenWatch(stack, bodies) as watch:
                await watch.more(30)
                began = time.monotonic()
                await watch.more(STREAM_TOKENS // 3)
                middle = time.monotonic()
                asking: list[asyncio.Task[float]] = []
                while min(map(len, watch.arrivals)) < STREAM_TOKENS - 200:
                    due = middle + len(asking) * ARRIVAL_S
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    found = next(arrivals, None)
                    if found is None:
                        break
                    asking.append(asyncio.create_task(_ask(client, zoo, *found)))
                ended = time.monotonic()
                waits += await asyncio.gather(*asking)
                quiet += watch.gaps(began, middle)
                among += watch.gaps(middle, ended)
    figures = {
        "arrivals": len(waits),
        "p99_gap_quiet_ms": round(1e3 * _p99(quiet), 2),
        "p99_gap_ms": round(1e3 * _p99(among), 2),
        "ratio": round(_p99(among) / _p99(quiet), 2),
        "median_gap_ms": round(1e3 * statistics.median(quiet), 2),
        "median_wait_ms": round(1e3 * statistics.median(waits), 1),
        "busy_before": round(busy, 2),
    }
    record_figures("arrivals", figures)
    if busy > QUIET_SHARE:
        pytest.skip(f"other programs use {busy:.0%} of the processors: the figures say nothing about manylora")
    assert _p99(among) <= GAP_LIMIT * _p99(quiet)


async def _ask(client: object, zoo: Zoo, number: int, recipe: str) -> float:
    """Ask a version for the first time; the seconds to its whole answer, which is right."""
    began = time.monotonic()
    asked = question(recipe, zoo.fleet_prompt(recipe), model=f"{TENANT}/arrival-{number}")
    await ask_right(client, asked)  # type: ignore[arg-type]
    return time.monotonic() - began


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
