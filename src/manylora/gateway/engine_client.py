"""The engine behind its Unix socket. Owns what is asked and what failures mean; knows no tenant, no alias."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import msgspec

from manylora.gateway.engine_connection import ConnectionFailed, EngineConnection, Silent, Unsent
from manylora.gateway.engine_pool import ConnectionPool, Unreachable
from manylora.gateway.metrics import GatewayMetrics
from manylora.gateway.problems import SERVER_ERROR, Problem, Refusal, bad_request, engine_unavailable

PROBE_TIMEOUT_S = 2.0
MANAGEMENT_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 256 * 1024 * 1024
MAX_METRICS_BYTES = 64 * 1024 * 1024

RequestHeaders = Iterable[tuple[bytes, bytes]]

_JSON = ((b"content-type", b"application/json"),)
_UNSENDABLE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class EngineClient:
    """Requests to one engine. Belongs to the event loop in which it was made."""

    def __init__(self, socket: Path, silence_timeout_s: float, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._silence_timeout_s = silence_timeout_s
        self._pool = ConnectionPool(socket, silence_timeout_s)

    def post(self, path: str, body: bytes, headers: RequestHeaders) -> Call:
        """One request; leaving the block before its end cancels it on the engine too.

        Raises `Refusal` when the engine cannot be reached, goes away or falls silent, while reading as well.
        """
        return Call(self._pool, _head("POST", path, headers, len(body)), body, self._refusal)

    async def healthy(self) -> bool:
        """Whether the engine says that it can serve."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._get("/health") as answer:
                return answer.status == 200
        except (ConnectionFailed, TimeoutError):
            return False

    async def metrics_text(self) -> tuple[bytes, str]:
        """The engine's own metrics and their content type."""
        return await self._text("/metrics")

    async def residency(self) -> tuple[bytes, str]:
        """What is in the engine's adapter memory (JSON), and its content type."""
        return await self._text("/manylora/v1/residency")

    async def _text(self, path: str) -> tuple[bytes, str]:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._get(path) as answer:
                body = await read_answer(answer, MAX_METRICS_BYTES)
                return body, answer.content_type or "text/plain"
        except (ConnectionFailed, TimeoutError) as failure:
            raise self._refusal(failure) from None

    async def evict(self, engine_name: str) -> bool:
        """Ask the engine to drop a version from its memory; False where it holds none."""
        body = msgspec.json.encode({"engine_name": engine_name})
        try:
            async with asyncio.timeout(MANAGEMENT_TIMEOUT_S), self.post("/manylora/v1/evict", body, _JSON) as answer:
                return answer.status == 200
        except TimeoutError as failure:
            raise self._refusal(failure) from None

    def close(self) -> None:
        self._pool.close()

    def _get(self, path: str) -> Call:
        return Call(self._pool, _head("GET", path, (), 0), b"", None)

    def _refusal(self, failure: Exception) -> Refusal:
        if isinstance(failure, (Silent, TimeoutError)):
            self._metrics.engine_failures.labels("silent").inc()
            message = f"The engine said nothing for {self._silence_timeout_s:g} s."
            return Refusal(Problem(504, message, SERVER_ERROR, "engine_timeout"))
        if isinstance(failure, Unreachable):
            self._metrics.engine_failures.labels("unreachable").inc()
            return engine_unavailable()
        self._metrics.engine_failures.labels("broke_off").inc()
        return engine_unavailable("The engine broke off before the answer was complete.")


class Call:
    """One request and its answer, as an async context: entered once the answer's head is there."""

    __slots__ = ("_body", "_connection", "_head", "_pool", "_refusal")

    def __init__(
        self, pool: ConnectionPool, head: bytes, body: bytes, refusal: Callable[[Exception], Refusal] | None
    ) -> None:
        self._pool = pool
        self._head = head
        self._body = body
        self._refusal = refusal
        self._connection: EngineConnection | None = None

    async def __aenter__(self) -> EngineConnection:
        try:
            try:
                return await self._asked(self._pool.idle() or await self._pool.connect())
            except Unsent:
                # The engine cannot have begun with what it did not get; with anything else, it might have.
                return await self._asked(await self._pool.connect())
        except ConnectionFailed as failure:
            if self._refusal is None:
                raise
            raise self._refusal(failure) from None

    async def _asked(self, connection: EngineConnection) -> EngineConnection:
        try:
            await connection.send(self._head, self._body)
            await connection.head()
        except BaseException:
            self._pool.give_back(connection)
            raise
        self._connection = connection
        return connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._connection is not None
        self._pool.give_back(self._connection)
        if self._refusal is not None and isinstance(error, ConnectionFailed):
            raise self._refusal(error) from None


def _head(method: str, path: str, headers: RequestHeaders, body_bytes: int) -> bytes:
    """The request's head. The host is never looked up: every connection goes to the socket."""
    lines = [name + b": " + value for name, value in headers]
    if _UNSENDABLE.search(b"".join(lines)):
        raise bad_request("A header of this request cannot be passed on.")
    length = b"content-length: %d\r\n" % body_bytes if method == "POST" else b""
    start = f"{method} {path} HTTP/1.1\r\nhost: engine\r\n".encode("ascii")
    return b"%b%b\r\n%b\r\n" % (start, b"\r\n".join(lines), length) if lines else b"%b%b\r\n" % (start, length)


async def read_answer(answer: EngineConnection, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """The whole body of an answer that is not a stream."""
    if (answer.content_length or 0) > max_bytes:
        raise _too_large()
    parts: list[bytes] = []
    size = 0

    def take(piece: bytes) -> None:
        nonlocal size
        size += len(piece)
        if size > max_bytes:
            raise _too_large()
        parts.append(piece)

    await answer.each(take)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large() -> Refusal:
    return Refusal(Problem(502, "The engine's answer is too large.", SERVER_ERROR, "bad_engine_answer"))
