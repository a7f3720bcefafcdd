"""Our answer to a client: sent without a timer while the client reads, and with a deadline as soon as it does not.

Keeps the exchange's account of what was sent. Knows nothing of the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine

from starlette.types import Message, Send

from manylora.gateway.client import ClientGone
from manylora.gateway.eager import Waiting, run_now
from manylora.gateway.exchange import Exchange
from manylora.gateway.problems import Problem

Headers = list[tuple[bytes, bytes]]

_EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Reply:
    """One answer in the making. It starts with its first bytes, so that until then an error can take its place."""

    __slots__ = ("_exchange", "_send", "_whole", "_write_timeout_s", "started")

    def __init__(self, send: Send, exchange: Exchange, write_timeout_s: float) -> None:
        self._send = send
        self._exchange = exchange
        self._write_timeout_s = write_timeout_s
        self._whole = False
        self.started = False

    def events(self, chunk: bytes, headers: Headers) -> Coroutine[None, None, None] | None:
        """Send whole events of a stream; the first call starts it. Returns what is left to await, if anything is."""
        if self.started:
            self._exchange.bytes_sent += len(chunk)
            waiting = run_now(self._send({"type": "http.response.body", "body": chunk, "more_body": True}))
            return None if waiting is None else self._rest(waiting)
        return self._push(self._start(200, [*headers, *_EVENT_HEADERS]), self._body(chunk, more=True))

    async def finish(self) -> None:
        """End a stream."""
        await self._all(self._body(b"", more=False))

    async def whole(self, body: bytes, headers: Headers, status: int = 200) -> None:
        """A complete answer."""
        self._whole = True
        start = self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._all(start, self._body(body, more=False))

    async def fail(self, problem: Problem) -> None:
        """End a stream that has begun with an error event; an answer that has its length has no place for one."""
        if self._whole:
            raise ClientGone("the client did not read its answer in time")
        await self._all(self._body(problem.event(), more=False))

    async def refuse(self, problem: Problem) -> None:
        """An error in place of the answer."""
        await self.whole(problem.body(), problem.headers(), problem.status)

    def _start(self, status: int, headers: Headers) -> Message:
        self.started = True
        self._exchange.status = status
        headers.append((b"x-request-id", self._exchange.request_id.encode("ascii")))
        return {"type": "http.response.start", "status": status, "headers": headers}

    def _body(self, body: bytes, *, more: bool) -> Message:
        if body:
            exchange = self._exchange
            exchange.bytes_sent += len(body)
            if exchange.first_byte_s is None:
                exchange.first_byte_s = time.perf_counter() - exchange.started
        return {"type": "http.response.body", "body": body, "more_body": more}

    async def _all(self, *messages: Message) -> None:
        rest = self._push(*messages)
        if rest is not None:
            await rest

    def _push(self, *messages: Message) -> Coroutine[None, None, None] | None:
        for number, message in enumerate(messages, 1):
            waiting = run_now(self._send(message))
            if waiting is not None:
                return self._rest(waiting, *messages[number:])
        return None

    async def _rest(self, waiting: Waiting[None], *messages: Message) -> None:
        """The client is slow: from here on there is a deadline."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await waiting
                for message in messages:
                    await self._send(message)
        except TimeoutError:
            raise ClientGone("the client stopped reading its answer") from None
