"""The demo's client against a small server: streams, errors, streams that break off."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from manylora.demo.client import Answer, Client
from manylora.errors import Unavailable


def chunk(text: str | None, tokens: list[int] | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {} if text is None else {"content": text}, "token_ids": tokens}]}


def event(content: object) -> bytes:
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()


@asynccontextmanager
async def serving(*events: bytes, status: int = 200, seen: list[Any] | None = None) -> AsyncIterator[Client]:
    async def chat(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append((request.headers["Authorization"], await request.json()))
        if status != 200:
            return web.json_response({"error": {"message": "no such model"}}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in events:
            await response.write(part)
        return response

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a"}, {"id": "b"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server, Client(str(server.make_url("/v1")), "sk-1") as client:
        yield client


async def test_a_stream_gives_text_tokens_and_times() -> None:
    seen: list[Any] = []
    grown: list[int] = []
    watch: Callable[[Answer], None] = lambda answer: grown.append(len(answer.tokens))  # noqa: E731
    parts = [event(chunk("", None)), event(chunk("He", [1])), event(chunk("llo", [2, 3])), event(chunk(None, [9]))]
    async with serving(*parts, event("[DONE]"), seen=seen) as client:
        answer = await client.ask("m", "Hi?", max_tokens=4, on_chunk=watch, seed=1)
    assert (answer.text, answer.tokens, grown) == ("Hello", [1, 2, 3, 9], [1, 3, 4])
    assert 0 < answer.first_token_s <= answer.total_s
    assert len(answer.gaps_s()) == 2
    key, body = seen[0]
    assert key == "Bearer sk-1"
    assert body["temperature"] == 0 and body["seed"] == 1 and body["max_tokens"] == 4


async def test_models_are_listed() -> None:
    async with serving() as client:
        assert await client.models() == ["a", "b"]


async def test_an_error_is_told_with_its_body() -> None:
    async with serving(status=404) as client:
        with pytest.raises(Unavailable, match=r"404.*no such model"):
            await client.ask("m", "Hi?", max_tokens=4)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([event(chunk("He", [1]))], "broke off"),
        ([event({"error": {"message": "engine died"}})], "engine died"),
        ([event("[DONE]")], "without a token"),
    ],
)
async def test_a_broken_stream_is_no_answer(events: list[bytes], message: str) -> None:
    async with serving(*events) as client:
        with pytest.raises(Unavailable, match=message):
            await client.ask("m", "Hi?", max_tokens=4)
