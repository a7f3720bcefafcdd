"""The engine's door as an ASGI application, around a fake vLLM and fake workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from manylora.engine.http import AdapterDoor, Message, Receive, Scope, Send
from manylora.engine.metrics import EngineMetrics
from manylora.engine.residency import AdapterLoadFailed, AdapterMemoryFull, Loaded, Residency, Resident
from manylora.engine.settings import EngineSettings
from manylora.settings import MemorySize

DIGEST = "3f9c2a1b0d4e5f60" + "0" * 48
NAME = "acme/support@v7-3f9c2a1b0d4e5f60"


class FakeAccount:
    """Leases whatever exists; remembers who is inside."""

    places = 4

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.error: Exception | None = None
        self.evictable: dict[str, int] = {}
        self.resident: list[Resident] = []

    @asynccontextmanager
    async def lease(self, engine_name: str, find_folder: Any) -> AsyncIterator[None]:
        if self.error is not None:
            raise self.error
        folder = find_folder()
        if folder is None:
            from manylora.engine.residency import AdapterNotOnDisk

            raise AdapterNotOnDisk("not here")
        self.inside.append(engine_name)
        yield
        self.inside.remove(engine_name)

    def residents(self) -> list[Resident]:
        return self.resident

    def waiting(self) -> int:
        return 6

    async def evict(self, name: str) -> int | None:
        return self.evictable.pop(name, None)


class FakeWorkers:
    """Workers that hold what the test says."""

    def __init__(self) -> None:
        self.adapters: list[int] = []
        self.connected = 0

    async def connect(self) -> None:
        self.connected += 1

    async def residency(self) -> dict[str, Any]:
        return {"adapters": self.adapters, "budget_bytes": 1000, "used_bytes": 300, "in_step_loads": 5}


class World:
    """The door with a fake vLLM behind it that tells what it was asked and who held a lease then."""

    def __init__(self, tier: Path) -> None:
        self.account = FakeAccount()
        self.reached: list[tuple[str, bytes, tuple[str, ...]]] = []
        self.registry = CollectorRegistry()
        settings = EngineSettings(tier, None, None, MemorySize(bytes_=1000), 1, 1, allow_untested_vllm=False)
        self.workers = FakeWorkers()
        connected: Any = (self.account, self.workers)
        self.door = AdapterDoor(
            self._vllm, settings=settings, metrics=EngineMetrics(self.registry), connect=lambda state: connected
        )

    async def _vllm(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"] if scope["method"] == "POST" else b""
        self.reached.append((scope["path"], body, tuple(self.account.inside)))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"vllm"})

    async def ask(self, method: str, path: str, *chunks: bytes) -> tuple[int, Any]:
        pending = [
            {"type": "http.request", "body": chunk, "more_body": number < len(chunks) - 1}
            for number, chunk in enumerate(chunks or (b"",))
        ]
        sent: list[Message] = []

        async def receive() -> Message:
            return pending.pop(0) if pending else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "app": SimpleNamespace(state=None)}
        await self.door(scope, receive, send)
        body = b"".join(m.get("body", b"") for m in sent)
        return sent[0]["status"], json.loads(body) if body.startswith(b"{") else body.decode()


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / DIGEST).mkdir()
    return World(tmp_path)


async def test_adapter_is_leased_while_vllm_answers_and_released_after(world: World) -> None:
    body = json.dumps({"model": NAME, "prompt": "x"}).encode()
    assert await world.ask("POST", "/v1/completions", body[:20], body[20:]) == (200, "vllm")
    assert world.reached == [("/v1/completions", body, (NAME,))]
    assert world.account.inside == []


@pytest.mark.parametrize("model", ["base", "../x", "acme/support", "acme/support@v7", "😀", ""])
async def test_other_names_are_vllms_to_answer(world: World, model: str) -> None:
    body = json.dumps({"model": model}).encode()
    assert (await world.ask("POST", "/v1/completions", body))[0] == 200
    assert world.reached == [("/v1/completions", body, ())]


@pytest.mark.parametrize(
    "body",
    [
        b'{"temperature": NaN, "model": "%s"}' % NAME.encode(),
        b'{"model": "base", "model": "%s"}' % NAME.encode(),
        b'{"model": "acme\\/support@v7-3f9c2a1b0d4e5f60", "x": Infinity}',
    ],
    ids=["not a number", "named twice", "escaped"],
)
async def test_whatever_vllm_would_read_as_the_model_is_leased(world: World, body: bytes) -> None:
    await world.ask("POST", "/v1/completions", body)
    assert world.reached[0][2] == (NAME,)


async def test_errors_of_a_lease_have_their_own_codes(world: World) -> None:
    body = json.dumps({"model": NAME}).encode()
    for error, status, code in [
        (AdapterLoadFailed("rank 128 is too large"), 500, "adapter_load_failed"),
        (AdapterMemoryFull("full"), 503, "adapter_memory_full"),
    ]:
        world.account.error = error
        got, answer = await world.ask("POST", "/v1/completions", body)
        assert (got, answer["error"]["code"]) == (status, code)
    world.account.error = None
    missing = json.dumps({"model": NAME[:-1] + "1"}).encode()
    got, answer = await world.ask("POST", "/v1/completions", missing)
    assert (got, answer["error"]["code"]) == (404, "adapter_not_on_disk")
    assert world.reached == []


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/adapters/x"])
async def test_vllms_load_routes_are_closed(world: World, path: str) -> None:
    assert (await world.ask("POST", path, b"{}"))[0] == 404
    assert world.reached == []


async def test_evict(world: World) -> None:
    world.account.evictable[NAME] = 42
    body = json.dumps({"engine_name": NAME}).encode()
    assert await world.ask("POST", "/manylora/v1/evict", body) == (200, {"freed_bytes": 42})
    assert (await world.ask("POST", "/manylora/v1/evict", body))[0] == 404
    assert (await world.ask("POST", "/manylora/v1/evict", b"[]"))[0] == 400
    assert (await world.ask("GET", "/manylora/v1/other"))[0] == 404


def resident(lora_id: int, loaded: Loaded | None, in_flight: int = 0) -> Resident:
    ready: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
    if loaded is not None:
        ready.set_result(loaded)
    return Resident(f"acme/a@v{lora_id}-3f9c2a1b0d4e5f60", lora_id, Path("/tier") / DIGEST, ready, in_flight)


async def test_residency_says_what_is_where_and_what_it_takes(world: World) -> None:
    world.account.resident = [
        resident(1, Loaded(200, 0.1, "host"), in_flight=2),
        resident(2, None, 1),
        resident(3, Loaded(9, 1, "host")),
    ]
    world.workers.adapters = [1, 2]
    status, answer = await world.ask("GET", "/manylora/v1/residency")
    assert status == 200
    assert answer["budget"] == {"adapters": 4, "bytes": 1000, "used_bytes": 300}
    assert answer["waiting"] == 6
    assert answer["adapters"][0] == {
        "engine_name": "acme/a@v1-3f9c2a1b0d4e5f60",
        "digest": DIGEST,
        "tier": "device",
        "in_flight": 2,
        "size_bytes": 200,
    }
    # One whose load has not ended, and one that the workers do not have (any more).
    assert [each["tier"] for each in answer["adapters"]] == ["device", "loading", "loading"]
    assert [each["size_bytes"] for each in answer["adapters"]] == [200, 0, 9]


async def test_metrics_are_refreshed_on_the_way(world: World) -> None:
    world.workers.adapters = [1, 2]
    assert await world.ask("GET", "/metrics") == (200, "vllm")
    value = world.registry.get_sample_value
    assert value("vllm:num_loras_in_gpu") == 2
    assert value("manylora:adapters", {"tier": "device"}) == 2
    assert value("manylora:adapter_bytes", {"tier": "device"}) == 300
    assert value("manylora:adapter_in_step_loads") == 5
    assert value("manylora:adapter_budget_bytes", {"tier": "device"}) == 1000
    assert value("manylora:adapter_waiting") == 6


async def test_caller_that_leaves_while_sending_reaches_nobody(world: World) -> None:
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "app": SimpleNamespace(state=None)}

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError("nothing to say")

    await world.door(scope, gone, send)
    assert world.reached == []


def test_account_fits_the_door() -> None:
    """The fake above stands for `Residency`: what the door calls on it must exist there."""
    for name in ("lease", "residents", "evict", "places", "waiting"):
        assert hasattr(Residency, name)


async def test_the_workers_are_met_with_the_first_request_whatever_it_is(world: World) -> None:
    await world.ask("GET", "/health")
    await world.ask("GET", "/health")
    await asyncio.sleep(0)
    assert world.workers.connected == 1
