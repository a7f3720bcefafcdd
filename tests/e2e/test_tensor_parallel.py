"""Two ranks of tensor parallelism, each a process with its own shards of the same adapters (gloo)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import processes, recipes
from harness.asking import ask_all, async_client, question
from harness.stack import Stack, StackHolder, create_stack
from harness.zoo import BASE, Zoo


@pytest.fixture(scope="module")
def two_ranks(holder: StackHolder, zoo: Zoo) -> Iterator[Stack]:
    """An engine of two workers, each with a core of its own."""
    holder.stopped()
    stack = create_stack(zoo, "--tensor-parallel-size", "2", "--max-loras", "64", "--max-cpu-loras", "64")
    stack.env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    try:
        stack.start()
        yield stack
    finally:
        stack.end()


async def test_shards_of_every_kind_of_adapter_add_up(two_ranks: Stack, zoo: Zoo) -> None:
    """Base and all kinds of adapters, mixed: every answer is PEFT's, token for token."""
    names = [recipe.name for recipe in recipes.CASES]
    for name in names:
        two_ranks.publish(name)
    assert len(two_ranks.by_role(processes.WORKER)) == 2
    questions = [question(name, prompt) for prompt in zoo.group("short", "medium") for name in (BASE, *names)]
    async with async_client(two_ranks) as client:
        await ask_all(client, questions, concurrency=8)
    assert {str(each["tier"]) for each in two_ranks.residency()} == {"device"}
