"""The OpenAI routes that generate: from a client's request to the engine's answer under the client's names.

Owns the order of the steps; what each one means lies in the modules it calls.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import aiohttp
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from manylora.gateway import request_body
from manylora.gateway.admission import Admission, Target, stickiness
from manylora.gateway.answer import EventStream, Naming
from manylora.gateway.client import ClientGone, Reply, run_for_client
from manylora.gateway.drain import Drain
from manylora.gateway.engine_client import ORIGIN, EngineClient, read_answer
from manylora.gateway.engine_errors import NOT_ON_DISK, EngineFailure, Scrubber, problem_from
from manylora.gateway.exchange import Exchange, exchange_of
from manylora.gateway.fetch import Fetcher
from manylora.gateway.metrics import GatewayMetrics
from manylora.gateway.problems import Refusal, engine_unavailable, problem_of, unavailable
from manylora.gateway.request_body import JsonBody
from manylora.settings import Settings
from manylora.telemetry import fields

MAX_IN_FLIGHT = 4096
MAX_ERROR_BYTES = 1024 * 1024
# What a client may say to the engine beside the body. Everything else stays here, its identity headers first.
FORWARDED_HEADERS = ("content-type", "accept", "traceparent", "tracestate")

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


@dataclass(frozen=True, slots=True)
class _Call:
    """One request as the engine gets it."""

    target: Target
    body: bytes
    headers: Mapping[str, str]
    naming: Naming
    scrubber: Scrubber


class Generation:
    """ASGI endpoint of one route; the engine has it under the same path."""

    def __init__(self, path: str, parts: Parts) -> None:
        self._path = path
        self._url = ORIGIN.with_path(path)
        self._parts = parts
        settings = parts.settings
        self._folders = (settings.disk_tier, settings.run_dir, *settings.adapter_roots, settings.home)
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        exchange.route = self._path
        if self._in_flight >= MAX_IN_FLIGHT:
            raise Refusal(unavailable("Too many requests are being answered at the moment."))
        self._in_flight += 1
        try:
            call = await self._admit(exchange, Headers(scope=scope), receive)
            await self._serve(exchange, call, receive, send)
        finally:
            self._in_flight -= 1

    async def _admit(self, exchange: Exchange, headers: Headers, receive: Receive) -> _Call:
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

    def _call(self, target: Target, body: JsonBody, headers: Mapping[str, str]) -> _Call:
        naming = Naming(target.engine_model, target.asked, strict=target.version is not None)
        scrubber = Scrubber(target.engine_model, target.asked, self._folders)
        return _Call(target, body.with_model(target.engine_model), headers, naming, scrubber)

    async def _serve(self, exchange: Exchange, call: _Call, receive: Receive, send: Send) -> None:
        """Answer; once the answer has begun, an error can only be its last event."""
        reply = Reply(send, self._parts.settings.upstream_timeout_s)
        try:
            await run_for_client(self._answer(exchange, call, reply), receive, self._parts.drain)
        except ClientGone:
            raise
        except Exception as error:
            problem = problem_of(error)
            exchange.error = problem.code
            if not reply.started:
                raise
            if problem.code == "internal_error":
                self._parts.metrics.unexpected_errors.inc()
                logger.exception("unexpected error", extra=fields(request_id=exchange.request_id))
            await reply.fail(problem)

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
        async with self._parts.engine.post(self._url, call.body, call.headers) as response:
            if response.status != 200:
                return EngineFailure.read(response.status, await read_answer(response, MAX_ERROR_BYTES))
            if response.content_type == "text/event-stream":
                await _relay_events(response, call, reply)
            else:
                await _relay_whole(response, call, reply)
        return None


def _forwarded(headers: Headers, exchange: Exchange) -> dict[str, str]:
    forwarded = {name: headers[name] for name in FORWARDED_HEADERS if name in headers}
    forwarded["accept-encoding"] = "identity"
    forwarded["x-request-id"] = exchange.engine_request_id
    return forwarded


def _own_headers(call: _Call) -> list[tuple[bytes, bytes]]:
    """Which version answered: what a caller needs to tell the sides of a canary apart."""
    version = call.target.version
    return [] if version is None else [(b"x-manylora-version", str(version.ref).encode("ascii"))]


async def _relay_whole(response: aiohttp.ClientResponse, call: _Call, reply: Reply) -> None:
    body, error = call.naming.restore(await read_answer(response))
    if error is not None:
        raise Refusal(problem_from(EngineFailure.read(500, body), call.scrubber))
    await reply.whole(body, [*_own_headers(call), (b"content-type", b"application/json")])


async def _relay_events(response: aiohttp.ClientResponse, call: _Call, reply: Reply) -> None:
    stream = EventStream(call.naming, call.scrubber)
    own_headers = _own_headers(call)
    async for chunk in response.content.iter_any():
        if events := stream.feed(chunk):
            await reply.event_chunk(events, own_headers)
        if stream.failed is not None:
            raise Refusal(stream.failed)
    if not stream.done:
        raise engine_unavailable("The engine broke off before the answer was complete.")
    await reply.finish()


def _log_failure(exchange: Exchange, failure: EngineFailure) -> None:
    """Tell the operator what the client does not get to read. Refusals may quote the prompt, so they are left out."""
    message = failure.message if failure.status >= 500 or failure.code is not None else None
    said = fields(
        request_id=exchange.request_id, engine_status=failure.status, code=failure.code, engine_message=message
    )
    logger.warning("the engine did not answer", extra=said)
