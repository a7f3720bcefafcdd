"""The gateway's ASGI application: which path leads where. Owns the wiring; knows nothing of processes and signals.

A path that is not listed here does not exist, whatever the engine may have under it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from manylora.errors import ManyloraError
from manylora.gateway.admission import Admission
from manylora.gateway.completions import Generation, Parts
from manylora.gateway.drain import Drain
from manylora.gateway.engine_client import EngineClient
from manylora.gateway.exchange import ExchangeLog, Ledger, exchange_of
from manylora.gateway.fetch import Fetcher
from manylora.gateway.health import Health
from manylora.gateway.lora_api import LoraApi
from manylora.gateway.metrics import GatewayMetrics
from manylora.gateway.models_api import ModelsApi
from manylora.gateway.problems import NO_SUCH_PATH, WRONG_METHOD, problem_of
from manylora.gateway.registry_threads import ChangeWatch, Threads
from manylora.registry.catalog import Catalog
from manylora.settings import Settings
from manylora.tiers.disk import DiskTier

GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
REGISTRY_THREADS = 4


class GatewayApp:
    """The routes that generate, called directly, and everything else, which Starlette leads to its place.

    Its parts are made when the server starts it (ASGI lifespan), in the server's event loop; from then on `drain` is
    the `Drain` by which the server announces the end.
    """

    def __init__(self) -> None:
        self.drain: Drain | None = None
        self.generation: dict[str, Generation] = {}
        self.others: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self.generation.get(scope["path"]) if scope["type"] == "http" else None
        if generation is not None and scope["method"] == "POST":
            await generation(scope, receive, send)
        else:
            await self.others(scope, receive, send)


def create_app(
    settings: Settings, catalog: Catalog, disk_tier: DiskTier, engine_socket: Path, base_model_name: str
) -> GatewayApp:
    """The application; `base_model_name` is both what the engine serves the base model as and its name in the registry.

    The caller closes the catalog.
    """
    gateway = GatewayApp()
    metrics = GatewayMetrics()
    ledger = Ledger(metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with _parts(settings, catalog, disk_tier, engine_socket, base_model_name, metrics, ledger) as parts:
            gateway.drain, gateway.generation, app.router.routes[:] = parts
            yield

    app = Starlette(
        lifespan=lifespan,
        middleware=[Middleware(ExchangeLog, ledger=ledger)],
        exception_handlers={ManyloraError: partial(_on_error, ledger=ledger), HTTPException: _on_routing},
    )
    app.router.redirect_slashes = False
    gateway.others = app
    return gateway


@contextlib.asynccontextmanager
async def _parts(
    settings: Settings,
    catalog: Catalog,
    disk_tier: DiskTier,
    engine_socket: Path,
    base_model_name: str,
    metrics: GatewayMetrics,
    ledger: Ledger,
) -> AsyncIterator[tuple[Drain, dict[str, Generation], list[BaseRoute]]]:
    """Everything that lives as long as the server does, and the routes into it."""
    drain = Drain()
    async with contextlib.AsyncExitStack() as stack:
        threads = _closing(stack, Threads("registry", REGISTRY_THREADS))
        changes = _closing(stack, ChangeWatch(catalog, inline=settings.database_url.startswith("sqlite")))
        engine = _closing(stack, EngineClient(engine_socket, settings.upstream_timeout_s, metrics))
        fetcher = _closing(stack, Fetcher(catalog, disk_tier, metrics, settings.upstream_timeout_s))
        admission = Admission(catalog, threads, changes, base_model_name)
        lora = _closing(stack, LoraApi(settings, catalog, admission, fetcher, engine, base_model_name))
        models = ModelsApi(admission, base_model_name, datetime.now(UTC))
        health = Health(engine, changes, drain, admission, metrics)
        parts = Parts(settings, admission, fetcher, engine, drain, metrics, ledger)
        generation = {path: Generation(path, parts) for path in GENERATION_PATHS}
        yield drain, generation, [*_wrong_methods(), *_others(models, lora, health)]


def _wrong_methods() -> list[BaseRoute]:
    """The routes that generate, for other methods than theirs."""
    return [Route(path, _no_such_path, methods=["POST"]) for path in GENERATION_PATHS]


async def _no_such_path(request: Request) -> Response:
    """Reached by a POST only where Starlette takes a path for another one that it resembles."""
    return NO_SUCH_PATH.response()


def _others(models: ModelsApi, lora: LoraApi, health: Health) -> list[BaseRoute]:
    return [
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{model:path}", models.show, methods=["GET"]),
        Route("/v1/load_lora_adapter", lora.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", lora.unload, methods=["POST"]),
        Route("/healthz", health.alive, methods=["GET"]),
        Route("/readyz", health.ready, methods=["GET"]),
        Route("/metrics", health.metrics, methods=["GET"]),
        Route("/metrics/engine", health.engine_metrics, methods=["GET"]),
        Route("/admin/v1/residency", health.residency, methods=["GET"]),
    ]


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


def _closing(stack: contextlib.AsyncExitStack, part: C) -> C:
    stack.callback(part.close)
    return part


async def _on_error(request: Request, error: Exception, ledger: Ledger) -> Response:
    problem = problem_of(error)
    ledger.refused(exchange_of(request.scope), error, problem)
    return problem.response()


async def _on_routing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code != 405:
        return NO_SUCH_PATH.response()
    response = WRONG_METHOD.response()
    response.headers.update(error.headers or {})
    return response
