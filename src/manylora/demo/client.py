"""A small OpenAI client for the demo: one streamed chat request, with the moment of every chunk.

Owns the wire and the clock. It asks for token numbers beside the text (vLLM's `return_token_ids`), so that answers can
be compared exactly, even where a cut falls into the middle of a character.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from manylora.errors import Unavailable

REQUEST_LIMIT_S = 120.0


@dataclass(slots=True)
class Answer:
    """What came back: text, tokens, and when (seconds after the request was sent)."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    chunk_times_s: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        return self.chunk_times_s[0]

    @property
    def total_s(self) -> float:
        return self.chunk_times_s[-1]

    def gaps_s(self) -> list[float]:
        """The pauses between chunks."""
        return [later - earlier for earlier, later in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False)]

    def median_gap_s(self) -> float:
        return statistics.median(self.gaps_s())


class Client:
    """One key at one endpoint. Use as an async context manager."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """The names that this key may call."""
        async with self._session.get(f"{self._url}/models") as response:
            await _check(response)
            return [model["id"] for model in (await response.json())["data"]]

    async def ask(
        self,
        model: str,
        question: str,
        *,
        max_tokens: int,
        on_chunk: Callable[[Answer], None] | None = None,
        **fields: Any,
    ) -> Answer:
        """Stream one greedy answer; `on_chunk` sees it grow."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            **fields,
        }
        started = time.monotonic()
        answer = Answer()
        async with self._session.post(f"{self._url}/chat/completions", json=body) as response:
            await _check(response)
            async for choice in _choices(response):
                if not choice.get("token_ids"):
                    continue
                answer.text += choice["delta"].get("content") or ""
                answer.tokens += choice["token_ids"]
                answer.chunk_times_s.append(time.monotonic() - started)
                if on_chunk is not None:
                    on_chunk(answer)
        if not answer.tokens:
            raise Unavailable(f"the stream of {model} ended without a token", "the engine's log has the reason")
        return answer


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = (await response.text())[:500]
        raise Unavailable(f"{response.method} {response.url.path} was answered {response.status}: {text}")


async def _choices(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The choices of a server-sent event stream, until its end mark."""
    async for line in response.content:
        data = line.decode().strip().removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if not data or not data.startswith("{"):
            continue
        event = json.loads(data)
        if "error" in event:
            raise Unavailable(f"the stream ended with an error: {event['error']}")
        for choice in event["choices"]:
            yield choice
    raise Unavailable("the stream broke off before its end mark", "the engine may have died; its log has the reason")
