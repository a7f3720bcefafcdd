"""Greedy answers equal transformers + PEFT token for token: each adapter alone, and all of them mixed with the base."""

from __future__ import annotations

import random

import pytest
from harness import recipes
from harness.asking import (
    Answer,
    Question,
    ask_all,
    ask_right,
    async_client,
    check,
    question,
    request_fields,
    sync_client,
)
from harness.stack import TENANT, Stack
from harness.zoo import BASE, Zoo

NAMES = [recipe.name for recipe in recipes.CASES]
GROUPS = ("short", "medium", "long", "chat")


@pytest.fixture(autouse=True)
def published(stack: Stack) -> None:
    for name in NAMES:
        stack.publish(name)


@pytest.mark.parametrize("name", [BASE, *NAMES])
async def test_alone(stack: Stack, zoo: Zoo, name: str) -> None:
    """One request by itself, then one of every other prompt at once."""
    first, *rest = zoo.group(*GROUPS)
    async with async_client(stack) as client:
        await ask_right(client, question(name, first))
        await ask_all(client, [question(name, prompt) for prompt in rest])


async def test_200_mixed_requests_8_at_a_time(stack: Stack, zoo: Zoo) -> None:
    """Base and all adapters in the same batches, streamed and not, more adapters than the device has slots for."""
    engine = stack.engine_pids()
    draw = random.Random(2)
    names = [BASE, BASE, *NAMES]
    questions = [
        question(name, draw.choice(zoo.group(*GROUPS)), stream=draw.random() < 0.5)
        for name in [names[number % len(names)] for number in range(200)]
    ]
    draw.shuffle(questions)
    async with async_client(stack) as client:
        await ask_all(client, questions, concurrency=8)
    assert stack.engine_pids() == engine


async def test_all_at_once(stack: Stack, zoo: Zoo) -> None:
    """Every adapter on the same prompt in one burst: rows of one batch differ in nothing but the adapter."""
    [prompt, *_] = zoo.group("medium")
    async with async_client(stack) as client:
        await ask_all(client, [question(name, prompt) for name in (BASE, *NAMES, BASE)], concurrency=16)


def test_the_synchronous_client(stack: Stack, zoo: Zoo) -> None:
    with sync_client(stack) as client:
        for name in ("patterns", BASE, "rslora"):
            [chat, *_] = zoo.group("chat")
            asked = question(name, chat)
            reply = client.chat.completions.create(**request_fields(asked), extra_body={"return_token_ids": True})
            assert reply.usage is not None
            assert reply.usage.completion_tokens == asked.max_tokens
            assert reply.usage.prompt_tokens == len(chat.token_ids)
            [choice] = reply.choices
            check(asked, _answer(asked, choice.token_ids, choice.message.content))


def test_logprobs(stack: Stack, zoo: Zoo) -> None:
    """The best token by log probability is the one chosen, for an adapter too."""
    [prompt, *_] = zoo.group("short")
    asked = question("r16-bf16", prompt)
    with sync_client(stack) as client:
        extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        reply = client.completions.create(**request_fields(asked), logprobs=2, extra_body=extra)
    [choice] = reply.choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [f"token_id:{number}" for number in asked.reference]
    for chosen, top in zip(choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or [], strict=True):
        assert chosen == max(top.values())
        assert chosen <= 0


def test_models_lists_what_may_be_asked(stack: Stack) -> None:
    with sync_client(stack) as client:
        listed = {model.id for model in client.models.list()}
    assert recipes.BASE_NAME in listed
    assert {f"{TENANT}/{name}" for name in NAMES} <= listed


def _answer(asked: Question, token_ids: list[int], text: str | None) -> Answer:
    assert text is not None
    return Answer(tuple(token_ids), text)
