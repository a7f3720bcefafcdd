"""What operators and probes ask: alive, ready, metrics. Needs no key, and tells no name of a tenant or an adapter.

The engine's metrics and what is in its memory carry adapter names: they need an admin key, or a caller on this very
machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.errors import Unavailable
from manylora.gateway.admission import Admission
from manylora.gateway.drain import Drain
from manylora.gateway.engine_client import EngineClient
from manylora.gateway.exchange import exchange_of
from manylora.gateway.metrics import GatewayMetrics
from manylora.gateway.registry_threads import ChangeWatch

# A request that went through a proxy comes from wherever the proxy's client is.
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


class Health:
    """The routes without a key."""

    def __init__(
        self, engine: EngineClient, changes: ChangeWatch, drain: Drain, admission: Admission, metrics: GatewayMetrics
    ) -> None:
        self._engine = engine
        self._changes = changes
        self._drain = drain
        self._admission = admission
        self._metrics = metrics

    async def alive(self, request: Request) -> Response:
        exchange_of(request.scope).route = "/healthz"
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 when a request would be served now; the parts that say no are named."""
        exchange_of(request.scope).route = "/readyz"
        parts = {
            "engine": await self._engine.healthy(),
            "registry": await self._registry_readable(),
            "accepting": not self._drain.begun,
        }
        ready = all(parts.values())
        return JSONResponse({"status": "ready" if ready else "not ready", "parts": parts}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        exchange_of(request.scope).route = "/metrics"
        body, content_type = self._metrics.exposition()
        return Response(body, headers={"content-type": content_type})

    async def engine_metrics(self, request: Request) -> Response:
        return await self._of_engine(request, "/metrics/engine", self._engine.metrics_text)

    async def residency(self, request: Request) -> Response:
        """Which adapters are in the engine's memory, and who uses them."""
        return await self._of_engine(request, "/admin/v1/residency", self._engine.residency)

    async def _of_engine(
        self, request: Request, route: str, ask: Callable[[], Awaitable[tuple[bytes, str]]]
    ) -> Response:
        exchange_of(request.scope).route = route
        if not from_this_machine(request):
            await self._admission.authenticate_admin(request.headers)
        body, content_type = await ask()
        return Response(body, headers={"content-type": content_type})

    async def _registry_readable(self) -> bool:
        try:
            await self._changes.seq()
        except Unavailable:
            return False
        return True


def from_this_machine(request: Request) -> bool:
    """Whether the connection comes from loopback and was not passed on by a proxy."""
    if request.client is None or any(name in request.headers for name in PROXY_HEADERS):
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
