"""The client's end of a request: its departure, and our answer to it. Knows nothing of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive, Send

from manylora.gateway.drain import Drain
from manylora.gateway.problems import Problem, Refusal, unavailable


class ClientGone(Exception):
    """The client closed its connection before its request was answered: no error, and nobody to tell."""


async def run_for_client(work: Coroutine[None, None, None], receive: Receive, drain: Drain) -> None:
    """Run `work` until it ends, the client leaves (`ClientGone`) or the process has no more time (`Refusal`).

    In the last two cases the work is cancelled, and with it the engine's part of the request.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait((task, gone, drain.deadline), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    if task.done() and not task.cancelled() and task.exception() is None:
        return None
    if drain.deadline.done():
        raise Refusal(unavailable("The gateway is shutting down."))
    raise ClientGone("the client left before its answer was complete")


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply:
    """One answer in the making. It starts with its first bytes, so that until then an error can take its place."""

    def __init__(self, send: Send, write_timeout_s: float) -> None:
        self._send = send
        self._write_timeout_s = write_timeout_s
        self.started = False

    async def whole(self, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """A complete answer."""
        await self._start([*headers, (b"content-length", b"%d" % len(body))])
        await self._body(body, more=False)

    async def event_chunk(self, chunk: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Whole events of a stream; the first call starts it."""
        if not self.started:
            await self._start([*headers, (b"content-type", b"text/event-stream; charset=utf-8"), *_NO_BUFFERING])
        await self._body(chunk, more=True)

    async def finish(self) -> None:
        """End a stream."""
        await self._body(b"", more=False)

    async def fail(self, problem: Problem) -> None:
        """End a stream that has begun with an error event."""
        await self._body(problem.event(), more=False)

    async def _start(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _body(self, body: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise ClientGone("the client stopped reading its answer") from None


_NO_BUFFERING = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
