"""A hundred adapters used in turn with room for eight: all answers right, memory flat, nothing restarts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import processes, recipes
from harness.asking import ask_all, async_client, question
from harness.stack import MAX_CPU_LORAS, Stack
from harness.zoo import Zoo

WARM = 40
"""Adapters used before memory is first read, one by one and together: allocators have grown to their size by then."""

ADAPTER_BYTES = 1_400_000
"""One adapter of the fleet in float32, as it lies in host memory."""


@pytest.mark.usefixtures("stack")
async def test_a_hundred_adapters_with_room_for_eight(
    stack: Stack, zoo: Zoo, record_figures: Callable[[str, object], None]
) -> None:
    engine, gateway = stack.engine_pids(), stack.gateway_pid()
    names = [recipe.name for recipe in recipes.FLEET]
    for name in names:
        stack.publish(name)
    questions = [question(name, zoo.fleet_prompt(name)) for name in names]
    async with async_client(stack) as client:
        for concurrency in (1, 8):
            await ask_all(client, questions[:WARM], concurrency=concurrency)
        before = processes.resident_bytes(engine)
        await ask_all(client, questions[WARM:], concurrency=1)
        in_turn = processes.resident_bytes(engine)
        # And against the grain: eight at a time, each already thrown out by those after it.
        await ask_all(client, questions, concurrency=8)
        await ask_all(client, list(reversed(questions)), concurrency=8)
        after = processes.resident_bytes(engine)
    record_figures("eviction_rss_mb", {"warm": before >> 20, "in_turn": in_turn >> 20, "end": after >> 20})
    assert stack.engine_pids() == engine
    assert stack.gateway_pid() == gateway
    assert len(stack.residency()) <= MAX_CPU_LORAS
    # Were none freed, the 60 after the warm-up alone would add 84 MB.
    assert after - before < 20 * ADAPTER_BYTES


async def test_evicted_on_request_and_asked_again(stack: Stack, zoo: Zoo) -> None:
    """What is told to leave memory is gone from the account, and comes back when it is asked for."""
    stack.publish("r4")
    asked = [question("r4", prompt) for prompt in zoo.group("short")]
    async with async_client(stack) as client:
        await ask_all(client, asked)
        [resident] = [entry for entry in stack.residency() if str(entry["engine_name"]).startswith("acme/r4@")]
        with stack.engine_client() as engine:
            freed = engine.post("/manylora/v1/evict", json={"engine_name": resident["engine_name"]})
            assert freed.status_code == 200
            assert freed.json()["freed_bytes"] == resident["size_bytes"] > 0
            again = engine.post("/manylora/v1/evict", json={"engine_name": resident["engine_name"]})
            assert again.status_code == 404
        assert resident["engine_name"] not in [entry["engine_name"] for entry in stack.residency()]
        await ask_all(client, asked)
