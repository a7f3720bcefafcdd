"""One request from arrival to its log line: its id, what became of it, and how long it took.

Outermost part of the app; answers what no code expected with a plain 500. Never sees a prompt, and never logs a key.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manylora.gateway.client import ClientGone
from manylora.gateway.metrics import GatewayMetrics
from manylora.gateway.problems import INTERNAL, Problem
from manylora.telemetry import fields

CLIENT_CLOSED_REQUEST = 499
SCOPE_KEY = "manylora.exchange"
OTHER_ROUTE = "other"
QUIET_ROUTES = frozenset({"/healthz", "/readyz", "/metrics", "/metrics/engine"})

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_own_log = logging.getLogger(__name__)
logger = logging.getLogger("manylora.gateway.requests")


@dataclass(slots=True)
class Exchange:
    """What is known of one request so far."""

    request_id: str
    route: str = OTHER_ROUTE
    started: float = field(default_factory=time.perf_counter)
    tenant: str | None = None
    key_id: str | None = None
    model_kind: str = "none"
    """`base`, `adapter` or `none`."""
    version: str | None = None
    status: int | None = None
    bytes_sent: int = 0
    first_byte_s: float | None = None
    error: str | None = None
    """The code of the error that ended it, where the status alone does not tell."""

    @property
    def engine_request_id(self) -> str:
        """The id that the engine gets: never one that another client could know, since engines abort by id."""
        return f"{self.request_id}-{secrets.token_hex(6)}"


def exchange_of(scope: Scope) -> Exchange:
    exchange = scope[SCOPE_KEY]
    assert isinstance(exchange, Exchange)
    return exchange


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's `x-request-id` if it is usable, else a new one."""
    given = headers.get("x-request-id")
    return given if given and _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


class Ledger:
    """Every exchange from its beginning to its end: the log line and the metrics."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._open = 0
        metrics.in_flight.set_function(lambda: self._open)

    def open(self, headers: Mapping[str, str], route: str = OTHER_ROUTE) -> Exchange:
        self._open += 1
        return Exchange(request_id_of(headers), route)

    def departed(self, exchange: Exchange) -> None:
        """The client has gone."""
        exchange.error = "client_gone"
        self._metrics.client_departures.inc()

    def refused(self, exchange: Exchange, error: Exception, problem: Problem) -> None:
        """An error that is the answer."""
        exchange.error = problem.code
        if problem.status >= 500:
            _own_log.warning("refused: %s", error, extra=fields(request_id=exchange.request_id, status=problem.status))

    def unexpected(self, exchange: Exchange) -> None:
        """An error that no code expected; called where it is being handled."""
        exchange.error = INTERNAL.code
        self._metrics.unexpected_errors.inc()
        logger.exception("unexpected error", extra=fields(request_id=exchange.request_id))

    def close(self, exchange: Exchange) -> None:
        seconds = time.perf_counter() - exchange.started
        status = exchange.status or CLIENT_CLOSED_REQUEST
        self._open -= 1
        series = self._metrics.exchange(exchange.route, exchange.model_kind, status)
        series.requests.inc()
        series.seconds.observe(seconds)
        series.response_bytes.inc(exchange.bytes_sent)
        if exchange.first_byte_s is not None:
            series.first_byte_seconds.observe(exchange.first_byte_s)
        level = logging.DEBUG if exchange.route in QUIET_ROUTES and status < 500 else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "request", extra=_line(exchange, status, seconds))


class ExchangeLog:
    """ASGI middleware: gives every request its `Exchange`, and closes it in the ledger."""

    def __init__(self, app: ASGIApp, ledger: Ledger) -> None:
        self._app = app
        self._ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        exchange = scope[SCOPE_KEY] = self._ledger.open(Headers(scope=scope))
        observed = _observing(exchange, send)
        try:
            await self._app(scope, receive, observed)
        except ClientGone:
            self._ledger.departed(exchange)
        except Exception:
            self._ledger.unexpected(exchange)
            if exchange.status is None:
                await INTERNAL.response()(scope, receive, observed)
        finally:
            self._ledger.close(exchange)
        return None


def _line(exchange: Exchange, status: int, seconds: float) -> dict[str, dict[str, str | int | float | bool | None]]:
    return fields(
        request_id=exchange.request_id,
        route=exchange.route,
        tenant=exchange.tenant,
        key_id=exchange.key_id,
        model_kind=exchange.model_kind,
        version=exchange.version,
        status=status,
        error=exchange.error,
        bytes=exchange.bytes_sent,
        ttft_s=None if exchange.first_byte_s is None else round(exchange.first_byte_s, 6),
        duration_s=round(seconds, 6),
    )


def _observing(exchange: Exchange, send: Send) -> Send:
    async def observed(message: Message) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", exchange.request_id.encode("ascii"))]
        elif body := message.get("body", b""):
            exchange.bytes_sent += len(body)
            if exchange.first_byte_s is None:
                exchange.first_byte_s = time.perf_counter() - exchange.started
        await send(message)

    return observed
