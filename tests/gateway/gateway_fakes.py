"""Stand-ins at the gateway's two seams: a registry in memory, and an engine with vLLM's HTTP on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from manylora.adapter import AdapterName, EngineName, Selector, VersionRef
from manylora.errors import InvalidAdapter, NotFound
from manylora.registry.records import AdapterInfo, Published, Version, VersionState
from manylora.tenant import Principal
from manylora.tiers.disk import DiskTier

BASE = "Tiny-Base"
NOW = datetime(2026, 1, 2, tzinfo=UTC)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class FakeAdapter:
    versions: list[Version] = field(default_factory=list)
    aliases: dict[str, int] = field(default_factory=dict)
    canary_weight: float = 0.0


class FakeCatalog:
    """The registry's door as the gateway uses it, counting what it is asked."""

    def __init__(self) -> None:
        self.seq = 1
        self.keys: dict[str, Principal] = {}
        self.granted: set[tuple[str, str, str]] = set()
        self.held: dict[AdapterName, FakeAdapter] = {}
        self.calls: dict[str, int] = {}
        self.fail: Exception | None = None
        self.download_delay_s = 0.0
        self.download_error: Exception | None = None

    def _asked(self, what: str) -> None:
        self.calls[what] = self.calls.get(what, 0) + 1
        if self.fail is not None:
            raise self.fail

    # what a test does
    def add_key(self, key: str, tenant: str, *, admin: bool = False) -> None:
        self.keys[key] = Principal(tenant, f"key-{tenant}", admin)
        self.seq += 1

    def revoke(self, key: str) -> None:
        del self.keys[key]
        self.seq += 1

    def add(self, name: str, *, base: str = BASE, live: bool = True, content: str | None = None) -> Version:
        adapter_name = AdapterName.parse(name)
        adapter = self.held.setdefault(adapter_name, FakeAdapter())
        number = len(adapter.versions) + 1
        ref = VersionRef(adapter_name, number, digest_of(content or f"{name}{number}"))
        version = Version(ref, base, 8, 100, NOW, "test", VersionState.READY)
        adapter.versions.append(version)
        if live:
            adapter.aliases["live"] = number
        self.seq += 1
        return version

    def promote(self, name: str, number: int) -> None:
        self.held[AdapterName.parse(name)].aliases["live"] = number
        self.seq += 1

    def canary(self, name: str, number: int, weight: float) -> None:
        adapter = self.held[AdapterName.parse(name)]
        adapter.aliases["canary"], adapter.canary_weight = number, weight
        self.seq += 1

    # what the gateway asks
    def change_seq(self) -> int:
        self._asked("change_seq")
        return self.seq

    def authenticate(self, key: str) -> Principal | None:
        self._asked("authenticate")
        return self.keys.get(key)

    def _may(self, tenant: str, name: AdapterName) -> bool:
        return name.tenant == tenant or any(
            grantee == tenant and owner == name.tenant and fnmatch.fnmatchcase(name.name, pattern)
            for grantee, owner, pattern in self.granted
        )

    def resolve(self, tenant: str, selector: Selector, *, sticky: str = "") -> Version:
        self._asked("resolve")
        adapter = self.held.get(selector.adapter)
        if adapter is None or not self._may(tenant, selector.adapter):
            raise NotFound("no such adapter")
        number = selector.number or adapter.aliases.get(selector.alias or "live")
        if selector.number is None and selector.alias is None and sticky and adapter.canary_weight:
            share = int(digest_of(sticky)[:8], 16) / 0xFFFFFFFF
            number = adapter.aliases["canary"] if share < adapter.canary_weight else number
        if number is None or number > len(adapter.versions):
            raise NotFound("no such version")
        version = adapter.versions[number - 1]
        if version.state is not VersionState.READY:
            raise NotFound("no such version")
        return version

    def adapter(self, name: AdapterName) -> AdapterInfo:
        adapter = self.held.get(name)
        if adapter is None:
            raise NotFound("no such adapter")
        base = adapter.versions[-1].base_model
        return AdapterInfo(name, dict(adapter.aliases), adapter.canary_weight, len(adapter.versions), base, NOW)

    def visible(self, tenant: str) -> list[AdapterInfo]:
        self._asked("visible")
        return [self.adapter(name) for name, held in self.held.items() if held.aliases and self._may(tenant, name)]

    def versions(self, name: AdapterName) -> list[Version]:
        return list(self.held[name].versions)

    def publish(self, folder: Path, name: AdapterName, *, base_model: str, actor: str, promote: bool) -> Published:
        self._asked("publish")
        config = folder / "adapter_config.json"
        if not config.is_file():
            raise InvalidAdapter("the folder has no adapter_config.json", "save the adapter with PEFT")
        version = self.add(str(name), base=base_model, content=config.read_text())
        return Published(version, True, True, ())

    def remove(self, name: AdapterName, *, actor: str) -> None:
        adapter = self.held[name]
        adapter.aliases.clear()
        adapter.versions[:] = [replace(version, state=VersionState.RETIRED) for version in adapter.versions]
        self.seq += 1

    def download(self, digest: str, into: Path) -> None:
        self._asked("download")
        time.sleep(self.download_delay_s)
        if self.download_error is not None:
            raise self.download_error
        (into / "adapter_config.json").write_text("{}")
        (into / "adapter_model.safetensors").write_bytes(b"\0")


Behaviour = Callable[[Request, dict[str, Any]], Response]


class FakeEngine:
    """vLLM's answers, with adapters found by digest in the disk tier as the real engine finds them."""

    def __init__(self, disk_tier: DiskTier) -> None:
        self.disk_tier = disk_tier
        self.behaviour: Behaviour | None = None
        self.healthy = True
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.evicted: list[str] = []
        self.arrived = threading.Event()
        self.closed_at: list[float] = []

    @property
    def last_body(self) -> dict[str, Any]:
        body = json.loads(self.requests[-1][2])
        assert isinstance(body, dict)
        return body

    def app(self) -> Starlette:
        paths = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
        return Starlette(
            routes=[
                *(Route(path, self._generate, methods=["POST"]) for path in paths),
                Route("/health", self._health),
                Route("/manylora/v1/residency", lambda request: JSONResponse({"adapters": [], "waiting": 0})),
                Route("/metrics", lambda request: PlainTextResponse('vllm:num_loras_in_gpu{model="m"} 1\n')),
                Route("/manylora/v1/evict", self._evict, methods=["POST"]),
                Route("/manylora/v1/residency", lambda request: JSONResponse({"adapters": []})),
                Route("/adapters", self._never, methods=["POST"]),
                Route("/v1/load_lora_adapter", self._never, methods=["POST"]),
            ]
        )

    def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    def _never(self, request: Request) -> Response:
        raise AssertionError("a management route of the engine was reached")

    async def _evict(self, request: Request) -> Response:
        self.evicted.append((await request.json())["engine_name"])
        return JSONResponse({"freed_bytes": 1})

    async def _generate(self, request: Request) -> Response:
        raw = await request.body()
        self.requests.append((request.url.path, dict(request.headers), raw))
        self.arrived.set()
        body = json.loads(raw)
        if body["model"] != BASE:
            name = EngineName.parse(body["model"])
            if not self.disk_tier.find_prefix(name.digest_prefix):
                return engine_error(404, "not here", code="adapter_not_on_disk")
        if self.behaviour is not None:
            return self.behaviour(request, body)
        return stream_of(body) if body.get("stream") else JSONResponse(whole_of(body))

    def hang(self, first: bytes = b"") -> Behaviour:
        """Say `first`, then nothing, and note when the other end goes away."""

        async def events() -> AsyncIterator[bytes]:
            try:
                if first:
                    yield first
                await asyncio.sleep(60)
            finally:
                self.closed_at.append(time.monotonic())

        return lambda request, body: StreamingResponse(events(), media_type="text/event-stream")

    def hang_whole(self) -> Behaviour:
        """As vLLM for an answer that is not streamed: nothing is sent until it is whole."""

        class Hanging(Response):
            async def __call__(inner, scope: Any, receive: Any, send: Any) -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                self.closed_at.append(time.monotonic())

        return lambda request, body: Hanging()


def engine_error(
    status: int, message: str, *, code: str | int | None = None, kind: str = "BadRequestError"
) -> Response:
    error = {"message": message, "type": kind, "param": None, "code": status if code is None else code}
    return JSONResponse({"error": error}, status)


def whole_of(body: dict[str, Any], text: str = "hello") -> dict[str, Any]:
    chat = "messages" in body
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    kind = "chat.completion" if chat else "text_completion"
    return {"id": "cmpl-1", "object": kind, "created": 1, "model": body["model"], "choices": [choice], "usage": usage}


def event_of(body: dict[str, Any], text: str) -> bytes:
    chat = "messages" in body
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    kind = "chat.completion.chunk" if chat else "text_completion"
    event = {"id": "cmpl-1", "object": kind, "created": 1, "model": body["model"], "choices": [choice]}
    return b"data: " + json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def stream_of(body: dict[str, Any], texts: tuple[str, ...] = ("he", "ll", "o")) -> Response:
    events = [event_of(body, text) for text in texts]
    return pieces(*events, b"data: [DONE]\n\n")


def pieces(*chunks: bytes, crash: bool = False) -> Response:
    """A stream sent in exactly these chunks; `crash` breaks the connection off after the last."""

    async def send() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk
            await asyncio.sleep(0.002)
        if crash:
            await asyncio.sleep(0.2)  # what came before must have been read: a broken connection drops the rest
            raise ConnectionResetError

    return StreamingResponse(send(), media_type="text/event-stream")


class ThreadedServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def running(server: uvicorn.Server, **options: Any) -> Iterator[uvicorn.Server]:
    """The server in a thread of its own, started on entry and stopped on exit."""
    thread = threading.Thread(target=server.run, kwargs=options, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        assert server.started
        yield server
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def engine_server(engine: FakeEngine, socket: Path) -> uvicorn.Server:
    config = uvicorn.Config(
        engine.app(),
        uds=str(socket),
        log_config=None,
        log_level="critical",
        lifespan="off",
        timeout_graceful_shutdown=0,
    )
    return ThreadedServer(config)
