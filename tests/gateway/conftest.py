"""A gateway on a random port over a fake registry and a fake engine."""

from __future__ import annotations

import sys
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from gateway_fakes import BASE, FakeCatalog, FakeEngine, engine_server, running
from gateway_world import ADMIN_KEY, KEY, OTHER_KEY, ThreadedGateway, World

from manylora.gateway.app import create_app
from manylora.gateway.server import bind
from manylora.settings import Settings
from manylora.tiers.disk import DiskTier


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    """The event loop that a gateway runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def settings_changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings that a test wants otherwise; parametrise it indirectly."""
    changes: dict[str, Any] = getattr(request, "param", {})
    return changes


@pytest.fixture
def settings(tmp_path: Path, settings_changes: dict[str, Any]) -> Settings:
    (tmp_path / "roots").mkdir()
    env = {"MANYLORA_HOME": str(tmp_path), "MANYLORA_ADAPTER_ROOTS": str(tmp_path / "roots")}
    usual: dict[str, Any] = {"port": 0, "max_body_bytes": 64 * 1024, "upstream_timeout_s": 20.0}
    return replace(Settings.from_env(env), **(usual | settings_changes))


@pytest.fixture
def catalog() -> FakeCatalog:
    catalog = FakeCatalog()
    catalog.add_key(KEY, "acme")
    catalog.add_key(OTHER_KEY, "globex")
    catalog.add_key(ADMIN_KEY, "acme", admin=True)
    catalog.add("acme/support")
    catalog.add("globex/secret")
    return catalog


@pytest.fixture
def engine_socket(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@pytest.fixture
def engine(settings: Settings) -> FakeEngine:
    """An engine that nobody has started yet."""
    return FakeEngine(DiskTier(settings.disk_tier))


@pytest.fixture
def gateway(settings: Settings, catalog: FakeCatalog, engine: FakeEngine, engine_socket: Path) -> Iterator[World]:
    """A running gateway, its engine not started."""
    disk_tier = DiskTier(settings.disk_tier)
    app = create_app(settings, catalog, disk_tier, engine_socket, BASE)  # type: ignore[arg-type]
    with bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = ThreadedGateway(app, grace_s=1)
        with running(server, sockets=[listener]), httpx.Client(base_url=url, timeout=20, verify=False) as client:
            yield World(url, catalog, engine, disk_tier, settings, client)


@pytest.fixture
def world(gateway: World, engine: FakeEngine, engine_socket: Path) -> Iterator[World]:
    """A running gateway and its engine."""
    with running(engine_server(engine, engine_socket)):
        yield gateway
