"""The engine's HTTP door: every request gets its adapter before vLLM sees it, and keeps it to the end.

    POST … with "model": "<engine name>"    leased, then passed on; errors are OpenAI's form
    GET  /manylora/v1/residency             what is in memory, and who uses it
    POST /manylora/v1/evict                 drop a version once its requests have ended
    GET  /metrics                           refreshed, then passed on
    load routes of vLLM and its aliases     404: adapters are found by digest, never by a path in a request

The engine listens on a Unix socket in a private folder; callers are the gateway and the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from manylora.adapter import EngineName
from manylora.engine.metrics import EngineMetrics
from manylora.engine.residency import AdapterLoadFailed, AdapterMemoryFull, AdapterNotOnDisk, Residency
from manylora.engine.settings import EngineSettings
from manylora.engine.worker_calls import WorkerMemory
from manylora.errors import InvalidName, ManyloraError
from manylora.tiers.disk import DiskTier

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
log = logging.getLogger(__name__)

Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PREFIX = "/manylora/v1/"
MAX_BODY_BYTES = 1 << 30
"""A last bound; the gateway's own is far smaller."""

_CLOSED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters")


class _Named(msgspec.Struct):
    """The one field of a request that this door reads."""

    model: str | None = None


class AdapterDoor:
    """Pure ASGI middleware around an engine's API server.

    `connect` is given the server's `app.state` with the first request, when its engine is up, and returns the account
    of its memory and the workers that hold it.
    """

    def __init__(
        self,
        app: App,
        *,
        settings: EngineSettings,
        metrics: EngineMetrics,
        connect: Callable[[Any], tuple[Residency, WorkerMemory]],
    ) -> None:
        self.app = app
        self._settings, self._metrics, self._connect = settings, metrics, connect
        self._connected: tuple[Residency, WorkerMemory] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route a request: ours, closed, or vLLM's."""
        if scope["type"] != "http" or self._settings.disk_tier is None:
            await self.app(scope, receive, send)
            return
        path = str(scope["path"])
        self._engine(scope)
        if path.startswith(_CLOSED):
            await _reply_error(send, 404, "not_found", f"no route {path}")
        elif path.startswith(PREFIX):
            await self._own_route(scope, receive, send, path.removeprefix(PREFIX))
        elif path.startswith("/metrics"):
            await self._refresh_metrics(scope)
            await self.app(scope, receive, send)
        elif scope["method"] == "POST":
            await self._serve(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, lease the adapter that it names, and hand the same body to vLLM."""
        body = await _read_body(receive)
        if body is None:
            return
        name = _adapter_in(body)
        replay = _Replay(body, receive)
        if name is None:
            await self.app(scope, replay, send)
            return
        try:
            async with self._engine(scope)[0].lease(str(name[0]), lambda: self._find_folder(name[1])):
                await self.app(scope, replay, send)
        except ManyloraError as error:
            log.warning("a request for %s is refused: %s: %s", name[0], type(error).__name__, error)
            await self._refuse(error, name[0], send)

    async def _refuse(self, error: ManyloraError, name: str, send: Send) -> None:
        """Answer a request whose adapter cannot be had; the kind of error says what the caller may do."""
        if isinstance(error, AdapterNotOnDisk):
            await _reply_error(send, 404, "adapter_not_on_disk", error.message)
        elif isinstance(error, AdapterLoadFailed):
            await _reply_error(send, 500, "adapter_load_failed", f"adapter {name}: {error}")
        elif isinstance(error, AdapterMemoryFull):
            await _reply_error(send, 503, "adapter_memory_full", str(error), retry_after_s=1)
        else:
            await _reply_error(send, 503, "service_unavailable", str(error), retry_after_s=1)

    def _find_folder(self, name: EngineName) -> Path | None:
        assert self._settings.disk_tier is not None
        found = DiskTier(self._settings.disk_tier).find_prefix(name.digest_prefix)
        if len(found) > 1:
            raise AdapterLoadFailed(f"{len(found)} versions share the digest prefix {name.digest_prefix}")
        return found[0][1] if found else None

    def _engine(self, scope: Scope) -> tuple[Residency, WorkerMemory]:
        """The account and the workers. They are met with the server's first request, a probe's mostly: an agent's
        memory takes a while to be pinned."""
        if self._connected is None:
            self._connected = self._connect(scope["app"].state)
            self._opening = asyncio.create_task(self._open(self._connected[1]), name="meet the workers")
        return self._connected

    async def _open(self, workers: WorkerMemory) -> None:
        with contextlib.suppress(ManyloraError):  # the first load tells it
            await workers.connect()

    async def _own_route(self, scope: Scope, receive: Receive, send: Send, route: str) -> None:
        account, workers = self._engine(scope)
        if route == "residency" and scope["method"] == "GET":
            await _reply(send, 200, await self._residency_report(account, workers))
        elif route == "evict" and scope["method"] == "POST":
            await self._evict(account, await _read_body(receive), send)
        else:
            await _reply_error(send, 404, "not_found", f"no route {PREFIX}{route}")

    async def _residency_report(self, account: Residency, workers: WorkerMemory) -> dict[str, Any]:
        held = await workers.residency()
        present = set(held["adapters"])
        adapters = [
            {
                "engine_name": r.engine_name,
                "digest": r.folder.name,
                "tier": "device" if r.is_ready and r.lora_id in present else "loading",
                "in_flight": r.in_flight,
                "size_bytes": r.ready.result().nbytes if r.is_ready else 0,
            }
            for r in account.residents()
        ]
        self._metrics.show(
            adapters=len(present),
            used_bytes=held["used_bytes"],
            budget_bytes=held["budget_bytes"],
            in_step_loads=held["in_step_loads"],
            waiting=account.waiting(),
        )
        return {
            "adapters": adapters,
            "budget": {
                "adapters": account.places,
                "bytes": held["budget_bytes"],
                "used_bytes": held["used_bytes"],
            },
            "waiting": account.waiting(),
        }

    async def _evict(self, account: Residency, body: bytes | None, send: Send) -> None:
        try:
            name = json.loads(body or b"")["engine_name"]
        except (ValueError, KeyError, TypeError):
            await _reply_error(send, 400, "invalid_request_error", 'send {"engine_name": "tenant/adapter@vN-digest"}')
            return
        freed = await account.evict(str(name))
        if freed is None:
            await _reply_error(send, 404, "not_found", "this version is not in memory")
        else:
            await _reply(send, 200, {"freed_bytes": freed})

    async def _refresh_metrics(self, scope: Scope) -> None:
        """Bring the gauges up to date; a busy or dead engine must not keep anyone from reading the rest."""
        try:
            async with asyncio.timeout(2.0):
                await self._residency_report(*self._engine(scope))
        except (TimeoutError, ManyloraError, OSError, RuntimeError):
            return


def _adapter_in(body: bytes) -> tuple[str, EngineName] | None:
    """The engine name in a request's body, as written and taken apart; None where there is none (vLLM answers then)."""
    model = _model_in(body)
    try:
        return (model, EngineName.parse(model)) if model else None
    except InvalidName:
        return None


def _model_in(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_Named).model
    except msgspec.MsgspecError:
        pass
    # vLLM's parser takes more than the standard allows (NaN, say): whatever it would read as the model counts here too.
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    model = fields.get("model") if isinstance(fields, dict) else None
    return model if isinstance(model, str) else None


class _Replay:
    """An ASGI `receive` that gives a body which was read before, then whatever comes (a disconnect)."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None if the caller left first or sends more than any request may hold."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


async def _reply(send: Send, status: int, payload: object, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    body = json.dumps(payload).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def _reply_error(send: Send, status: int, code: str, message: str, retry_after_s: int | None = None) -> None:
    headers = () if retry_after_s is None else ((b"retry-after", str(retry_after_s).encode()),)
    error = {"message": message, "type": code, "param": "model", "code": code}
    await _reply(send, status, {"error": error}, headers)
