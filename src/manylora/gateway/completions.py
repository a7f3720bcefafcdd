"""The OpenAI routes that generate: from a client's request to the engine's answer under the client's names.

Owns the order of the steps; what each one means lies in the modules it calls.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial

from starlette.types import Receive, Scope, Send

from manylora.gateway import request_body
from manylora.gateway.admission import Admission, Target, stickiness
from manylora.gateway.answer import EventStream, Naming
from manylora.gateway.client import ClientGone, run_for_client
from manylora.gateway.drain import Drain
from manylora.gateway.engine_client import EngineClient, read_answer
from manylora.gateway.engine_connection import EngineConnection
from manylora.gateway.engine_errors import ENGINE_ERROR, NOT_ON_DISK, EngineFailure, Scrubber, problem_from
from manylora.gateway.exchange import Exchange, Ledger
from manylora.gateway.fetch import Fetcher
from manylora.gateway.metrics import GatewayMetrics
from manylora.gateway.problems import INTERNAL, Problem, Refusal, engine_unavailable, problem_of, unavailable
from manylora.gateway.reply import Reply
from manylora.gateway.request_body import JsonBody
from manylora.settings import Settings
from manylora.telemetry import fields

MAX_IN_FLIGHT = 4096
MAX_ERROR_BYTES = 1024 * 1024
# What a client may say to the engine beside the body. Everything else stays here, its identity headers first.
FORWARDED_HEADERS = ("content-type", "accept", "traceparent", "tracestate")
# What is read here at all.
_READ_HEADERS = {
    name.encode("ascii"): name
    for name in (
        *FORWARDED_HEADERS,
        "authorization",
        "content-encoding",
        "content-length",
        "expect",
        "x-api-key",
        "x-request-id",
        "x-session-id",
    )
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the steps of a request need."""

    settings: Settings
    admission: Admission
    fetcher: Fetcher
    engine: EngineClient
    drain: Drain
    metrics: GatewayMetrics
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class _Call:
    """One request as the engine gets it."""

    target: Target
    body: bytes
    headers: list[tuple[bytes, bytes]]
    naming: Naming
    scrubber: Scrubber


class Generation:
    """ASGI application for POST on one route; the engine has it under the same path.

    It stands before Starlette, and does for its route what the app's middleware and error handlers do for others.
    """

    def __init__(self, path: str, parts: Parts) -> None:
        self._path = path
        self._parts = parts
        settings = parts.settings
        self._folders = (settings.disk_tier, settings.run_dir, *settings.adapter_roots, settings.home)
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_read(scope)
        ledger = self._parts.ledger
        exchange = ledger.open(headers, self._path)
        reply = Reply(send, exchange, self._parts.settings.upstream_timeout_s)
        self._in_flight += 1
        try:
            try:
                await self._respond(exchange, headers, receive, reply)
            except ClientGone:
                raise
            except Exception as error:
                await self._fail(exchange, reply, error)
        except ClientGone:
            ledger.departed(exchange)
        finally:
            self._in_flight -= 1
            ledger.close(exchange)

    async def _respond(self, exchange: Exchange, headers: Mapping[str, str], receive: Receive, reply: Reply) -> None:
        if self._in_flight > MAX_IN_FLIGHT:
            raise Refusal(unavailable("Too many requests are being answered at the moment."))
        call = await self._admit(exchange, headers, receive)
        await run_for_client(self._answer(exchange, call, reply), receive, self._parts.drain)

    async def _fail(self, exchange: Exchange, reply: Reply, error: Exception) -> None:
        """Tell the client; once the answer has begun, an error can only be its last event."""
        problem = problem_of(error)
        if problem.code == ENGINE_ERROR and not await self._parts.engine.healthy():
            # Not this request's failure: the engine's processes are going down, and are started again.
            problem = engine_unavailable().problem
        if problem is INTERNAL:
            self._parts.ledger.unexpected(exchange)
        elif reply.started:
            exchange.error = problem.code
        else:
            self._parts.ledger.refused(exchange, error, problem)
        await (reply.fail(problem) if reply.started else reply.refuse(problem))

    async def _admit(self, exchange: Exchange, headers: Mapping[str, str], receive: Receive) -> _Call:
        admission = self._parts.admission
        caller = await admission.authenticate(headers)
        exchange.tenant, exchange.key_id = caller.principal.tenant, caller.principal.key_id
        raw = await request_body.read_bytes(headers, receive, self._parts.settings.max_body_bytes)
        body = request_body.parse(raw)
        sticky = partial(stickiness, caller.principal.tenant, headers, body.fields)
        target = await admission.target(caller, body.model, sticky)
        exchange.model_kind = "adapter" if target.version else "base"
        exchange.version = target.engine_model if target.version else None
        return self._call(target, body, _forwarded(headers, exchange))

    def _call(self, target: Target, body: JsonBody, headers: list[tuple[bytes, bytes]]) -> _Call:
        naming = Naming(target.engine_model, target.asked, strict=target.version is not None)
        scrubber = Scrubber(target.engine_model, target.asked, self._folders)
        return _Call(target, body.with_model(target.engine_model), headers, naming, scrubber)

    async def _answer(self, exchange: Exchange, call: _Call, reply: Reply) -> None:
        failure = await self._attempt(call, reply)
        if failure is not None and failure.code == NOT_ON_DISK and call.target.version is not None:
            # Cleared away since we last looked: bring it back, once.
            self._parts.fetcher.forget(call.target.version.digest)
            failure = await self._attempt(call, reply)
        if failure is not None:
            self._parts.metrics.engine_failures.labels("refused" if failure.status < 500 else "failed").inc()
            _log_failure(exchange, failure)
            raise Refusal(problem_from(failure, call.scrubber))

    async def _attempt(self, call: _Call, reply: Reply) -> EngineFailure | None:
        version = call.target.version
        if version is not None:
            await self._parts.fetcher.ensure(version.digest)
        async with self._parts.engine.post(self._path, call.body, call.headers) as answer:
            if answer.status != 200:
                return EngineFailure.read(answer.status, await read_answer(answer, MAX_ERROR_BYTES))
            if answer.is_event_stream:
                await _relay_events(answer, call, reply)
            else:
                await _relay_whole(answer, call, reply)
        return None


def headers_read(scope: Scope) -> dict[str, str]:
    """The request's headers as far as they are read here; of one that is given twice, the first counts."""
    names = _READ_HEADERS
    return {names[name]: value.decode("latin-1") for name, value in reversed(scope["headers"]) if name in names}


def _forwarded(headers: Mapping[str, str], exchange: Exchange) -> list[tuple[bytes, bytes]]:
    forwarded = [
        (name.encode("ascii"), headers[name].encode("latin-1")) for name in FORWARDED_HEADERS if name in headers
    ]
    request_id = exchange.engine_request_id.encode("ascii")
    return [*forwarded, (b"accept-encoding", b"identity"), (b"x-request-id", request_id)]


def _own_headers(call: _Call) -> list[tuple[bytes, bytes]]:
    """Which version answered: what a caller needs to tell the sides of a canary apart."""
    version = call.target.version
    return [] if version is None else [(b"x-manylora-version", str(version.ref).encode("ascii"))]


async def _relay_whole(answer: EngineConnection, call: _Call, reply: Reply) -> None:
    body, error = call.naming.restore(await read_answer(answer))
    if error is not None:
        raise Refusal(problem_from(EngineFailure.read(500, body), call.scrubber))
    await reply.whole(body, [*_own_headers(call), (b"content-type", b"application/json")])


async def _relay_events(answer: EngineConnection, call: _Call, reply: Reply) -> None:
    stream = EventStream(call.naming, call.scrubber)
    own_headers = _own_headers(call)

    def take(chunk: bytes) -> Coroutine[None, None, None] | None:
        events = stream.feed(chunk)
        waiting = reply.events(events, own_headers) if events else None
        if stream.failed is None:
            return waiting
        return _refuse_after(waiting, stream.failed)

    await answer.each(take)
    if not stream.done:
        raise engine_unavailable("The engine broke off before the answer was complete.")
    await reply.finish()


async def _refuse_after(waiting: Coroutine[None, None, None] | None, problem: Problem) -> None:
    """The events before a bad one are the client's."""
    if waiting is not None:
        await waiting
    raise Refusal(problem)


def _log_failure(exchange: Exchange, failure: EngineFailure) -> None:
    """Tell the operator what the client does not get to read. Refusals may quote the prompt, so they are left out."""
    message = failure.message if failure.status >= 500 or failure.code is not None else None
    said = fields(
        request_id=exchange.request_id, engine_status=failure.status, code=failure.code, engine_message=message
    )
    logger.warning("the engine did not answer", extra=said)
