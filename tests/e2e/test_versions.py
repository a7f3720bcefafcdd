"""New weights under an old name, with prefix caching on: every answer is of exactly the version it was admitted for."""

from __future__ import annotations

import asyncio
import random

import openai
import pytest
from harness import recipes
from harness.asking import Question, ask, ask_all, ask_right, async_client, question, request_fields, traffic
from harness.stack import ACTOR, TENANT, Stack
from harness.zoo import BASE, Zoo

from manylora.adapter import AdapterName

GENERATIONS = [recipe.name for recipe in recipes.GENERATIONS]


def background(stack: Stack, zoo: Zoo) -> list[Question]:
    """Traffic of others, whose answers must stay right whatever happens to the adapter under test."""
    for name in ("r4", "r32"):
        stack.publish(name)
    return [question(name, prompt) for name in (BASE, "r4", "r32") for prompt in zoo.group("long", "short")]


async def test_reload_with_new_weights_under_traffic(stack: Stack, zoo: Zoo) -> None:
    """The long prompts share a cached prefix; KV cache of the version before would change the answer."""
    model = f"{TENANT}/reloaded"
    hits = stack.engine_metric("vllm:prefix_cache_hits_total")
    async with async_client(stack) as client, traffic(client, background(stack, zoo)) as others:
        for generation in GENERATIONS:
            await asyncio.to_thread(stack.publish, generation, "reloaded", promote=True)
            await ask_all(client, [question(generation, prompt, model=model) for prompt in zoo.group("long", "short")])
    assert not others.wrong
    assert not others.errors
    assert others.right > 0
    assert stack.engine_metric("vllm:prefix_cache_hits_total") > hits


async def test_pinned_versions_side_by_side(stack: Stack, zoo: Zoo) -> None:
    for generation in GENERATIONS:
        stack.publish(generation, "pinned")
    pinned = [
        question(generation, prompt, model=f"{TENANT}/pinned@v{number}")
        for number, generation in enumerate(GENERATIONS, 1)
        for prompt in zoo.group("long", "short")
    ]
    random.Random(3).shuffle(pinned)
    async with async_client(stack) as client:
        await ask_all(client, pinned)


async def test_promote_and_rollback_under_traffic(stack: Stack, zoo: Zoo) -> None:
    """A request that starts after a switch has returned is answered by the version switched to, and by no other."""
    name, draw = AdapterName(TENANT, "switched"), random.Random(4)
    for generation in GENERATIONS:
        stack.publish(generation, "switched", promote=None)
    live = 1
    async with async_client(stack) as client, traffic(client, background(stack, zoo)) as others:
        for _ in range(8):
            previous, live = live, draw.choice([n for n in range(1, 1 + len(GENERATIONS)) if n != live])
            await asyncio.to_thread(stack.catalog.promote, name, live, actor=ACTOR)
            await _all_are(client, zoo, live)
            if draw.random() < 0.5:
                assert await asyncio.to_thread(stack.catalog.rollback, name, actor=ACTOR) == previous
                await _all_are(client, zoo, previous)
                live = previous
    assert not others.wrong
    assert not others.errors


async def _all_are(client: openai.AsyncOpenAI, zoo: Zoo, live: int) -> None:
    generation = GENERATIONS[live - 1]
    await ask_all(client, [question(generation, prompt, model=f"{TENANT}/switched") for prompt in zoo.group("long")])


async def test_requests_in_flight_keep_their_version(stack: Stack, zoo: Zoo) -> None:
    """Asked before, during and after a stream of switches: always a whole answer of one version, never a mixture."""
    name = AdapterName(TENANT, "flipped")
    for generation in GENERATIONS[:2]:
        stack.publish(generation, "flipped", promote=False)
    [prompt, *_] = zoo.group("long")
    possible = {prompt.answers[generation] for generation in GENERATIONS[:2]}
    seen = set()

    async def asker(client: openai.AsyncOpenAI) -> None:
        for _ in range(8):
            answer = await ask(client, question(GENERATIONS[0], prompt, model=f"{TENANT}/flipped"))
            assert answer.token_ids in possible
            seen.add(answer.token_ids)

    async with async_client(stack) as client, asyncio.TaskGroup() as group:
        askers = [group.create_task(asker(client)) for _ in range(3)]
        number = 1
        while not all(task.done() for task in askers):
            number = 3 - number
            await asyncio.to_thread(stack.catalog.promote, name, number, actor=ACTOR)
            await asyncio.sleep(0.1)
    assert seen == possible


async def test_canary_splits_and_stays_within_the_two(stack: Stack, zoo: Zoo) -> None:
    name = AdapterName(TENANT, "split")
    for generation in GENERATIONS[:2]:
        stack.publish(generation, "split", promote=None)
    stack.catalog.set_canary(name, 2, 1.0, actor=ACTOR)
    [prompt, *_] = zoo.group("short")
    async with async_client(stack) as client:
        await ask_right(client, question(GENERATIONS[1], prompt, model=f"{TENANT}/split"))
        await ask_right(client, question(GENERATIONS[1], prompt, model=f"{TENANT}/split@canary"))
        await ask_right(client, question(GENERATIONS[0], prompt, model=f"{TENANT}/split@live"))
        stack.catalog.set_canary(name, None, 0.0, actor=ACTOR)
        await ask_right(client, question(GENERATIONS[0], prompt, model=f"{TENANT}/split"))


async def test_removed_then_requested(stack: Stack, zoo: Zoo) -> None:
    """A removed adapter is as absent as one that never was; pushed again it serves, under the next number."""
    stack.publish("gen1", "leaving")
    [prompt, *_] = zoo.group("short")
    asked = question("gen1", prompt, model=f"{TENANT}/leaving")
    async with async_client(stack) as client:
        await ask_right(client, asked)
        stack.catalog.remove(AdapterName(TENANT, "leaving"), actor=ACTOR)
        for model in (asked.model, f"{asked.model}@v1", f"{asked.model}@live"):
            with pytest.raises(openai.NotFoundError) as refused:
                await ask(client, question("gen1", prompt, model=model))
            assert refused.value.code == "model_not_found"
        again = stack.publish("gen2", "leaving")
        assert again.version.ref.number == 2
        await ask_right(client, question("gen2", prompt, model=asked.model))


async def test_aborted_while_loading(stack: Stack, zoo: Zoo) -> None:
    """Clients that give up on a cold adapter disturb nobody, and the adapter serves whoever asks next."""
    cold = [recipe.name for recipe in recipes.FLEET[40:52]]
    for name in cold:
        stack.publish(name, f"cold-{name}")
    others = background(stack, zoo)
    async with async_client(stack) as client, traffic(client, others) as log:
        for number, name in enumerate(cold):
            asked = question(name, zoo.fleet_prompt(name), model=f"{TENANT}/cold-{name}", stream=bool(number % 2))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.002 * number):
                    await ask(client, asked)
                raise TimeoutError  # answered within the limit: nothing to abort
        for name in cold:
            await ask_right(client, question(name, zoo.fleet_prompt(name), model=f"{TENANT}/cold-{name}"))
    assert not log.wrong
    assert not log.errors
    await _nothing_in_flight(stack)


async def test_aborted_while_streaming(stack: Stack, zoo: Zoo) -> None:
    """A client that leaves ends its generation in the engine; the others' answers are not touched."""
    others = background(stack, zoo)
    [prompt, *_] = zoo.group("medium")
    async with async_client(stack) as client, traffic(client, others) as log:
        for name in ("r4", BASE, "r32", "r4"):
            asked = question(name, prompt, stream=True)
            endless = {**request_fields(asked), "max_tokens": recipes.MAX_POSITION - 100}
            stream = await client.completions.create(**endless, extra_body={"ignore_eos": True})
            for _ in range(3):
                await anext(stream)
            await stream.close()
    assert not log.wrong
    assert not log.errors
    await _nothing_in_flight(stack)


async def _nothing_in_flight(stack: Stack) -> None:
    for _ in range(50):
        busy = [entry for entry in stack.residency() if entry["in_flight"]]
        if not busy and stack.engine_metric("vllm:num_requests_running") == 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"still in flight 5 s after every client left: {busy}")
