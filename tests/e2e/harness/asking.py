"""Clients of a running stack: ask a model for its greedy answer, judge it by PEFT's, keep traffic going meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from harness.recipes import BASE_NAME
from harness.stack import TENANT, Stack
from harness.zoo import BASE, Prompt

REQUEST_LIMIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: token ids, text, and, for a stream, when each chunk with tokens arrived (monotonic seconds)."""

    token_ids: tuple[int, ...]
    text: str
    arrivals: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt for one model; `expected` is the key of the reference that answers it."""

    model: str
    prompt: Prompt
    expected: str
    stream: bool = False

    @property
    def max_tokens(self) -> int:
        return len(self.prompt.answers[self.expected])

    @property
    def reference(self) -> tuple[int, ...]:
        return self.prompt.answers[self.expected]


def question(recipe: str, prompt: Prompt, *, model: str | None = None, stream: bool = False) -> Question:
    """Ask for the zoo's `recipe` under `model`, or under the name that it is published by."""
    default = BASE_NAME if recipe == BASE else f"{TENANT}/{recipe}"
    return Question(model or default, prompt, recipe, stream)


def async_client(stack: Stack, key: str | None = None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key=key or stack.key, max_retries=0, timeout=REQUEST_LIMIT_S
    )


def sync_client(stack: Stack, key: str | None = None) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key or stack.key, max_retries=0, timeout=REQUEST_LIMIT_S)


def request_fields(asked: Question) -> dict[str, Any]:
    """The body of a completion or chat request, the same for every client."""
    fields: dict[str, Any] = {
        "model": asked.model,
        "max_tokens": asked.max_tokens,
        "temperature": 0,
        "stream": asked.stream,
    }
    if asked.prompt.messages is None:
        fields["prompt"] = list(asked.prompt.token_ids)
    else:
        fields["messages"] = list(asked.prompt.messages)
    return fields


async def ask(client: openai.AsyncOpenAI, asked: Question, **extra: Any) -> Answer:
    """The answer of the OpenAI client; token ids come by vLLM's own field, which the gateway passes on."""
    surface: Any = client.completions if asked.prompt.messages is None else client.chat.completions
    reply = await surface.create(**request_fields(asked), extra_body={"return_token_ids": True, **extra})
    if asked.stream:
        return await _collect(reply)
    [choice] = reply.choices
    text = choice.text if asked.prompt.messages is None else choice.message.content
    return Answer(tuple(choice.token_ids), text)


async def _collect(reply: Any) -> Answer:
    ids: list[int] = []
    text, arrivals = "", []
    async for chunk in reply:
        for choice in chunk.choices:
            fresh = getattr(choice, "token_ids", None) or []
            ids += fresh
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
            if fresh:
                arrivals.append(time.monotonic())
    return Answer(tuple(ids), text, tuple(arrivals))


async def ask_right(client: openai.AsyncOpenAI, asked: Question, **extra: Any) -> Answer:
    """Ask, and fail unless the answer is PEFT's, token for token."""
    answer = await ask(client, asked, **extra)
    check(asked, answer)
    return answer


def check(asked: Question, answer: Answer) -> None:
    """Fail with who answered instead, where that can be told."""
    if answer.token_ids == asked.reference:
        assert answer.text == asked.prompt.texts[asked.expected]
        return
    impostors = [name for name, ids in asked.prompt.answers.items() if answer.token_ids == ids]
    raise AssertionError(
        f"{asked.model} on a {asked.prompt.group} prompt: {list(answer.token_ids)} instead of {list(asked.reference)}"
        f" (that is the answer of: {impostors or 'nobody'})"
    )


async def ask_all(client: openai.AsyncOpenAI, questions: Sequence[Question], concurrency: int = 8) -> list[Answer]:
    """Ask every question, `concurrency` at a time; all answers must be right."""
    gate = asyncio.Semaphore(concurrency)

    async def one(asked: Question) -> Answer:
        async with gate:
            return await ask_right(client, asked)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(asked)) for asked in questions]
    return [task.result() for task in tasks]


@dataclass
class TrafficLog:
    """What background traffic met. A wrong answer is never excused; an error may be, by the test."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)


@contextlib.asynccontextmanager
async def traffic(
    client: openai.AsyncOpenAI, questions: Sequence[Question], concurrency: int = 2, seed: int = 0
) -> AsyncIterator[TrafficLog]:
    """Ask `questions` at random, over and over, while the body runs; on leaving, requests in flight are finished."""
    log, over, draw = TrafficLog(), asyncio.Event(), random.Random(seed)

    async def worker() -> None:
        while not over.is_set():
            asked = draw.choice(questions)
            try:
                check(asked, await ask(client, asked))
                log.right += 1
            except AssertionError as wrong:
                log.wrong.append(str(wrong))
            except (openai.APIError, httpx.HTTPError) as error:
                # The client passes on what httpx says of a stream that breaks off.
                log.errors.append(error)
                await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
        try:
            yield log
        finally:
            over.set()
