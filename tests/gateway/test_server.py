"""A gateway process over a real registry: its start, its end, and changes made by another process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_fakes import BASE, FakeEngine, engine_server, event_of, running

from manylora.adapter import AdapterName
from manylora.errors import Unavailable
from manylora.gateway.server import bind
from manylora.registry.base_model import BaseModel
from manylora.registry.catalog import Catalog
from manylora.settings import Settings

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def registry(settings: Settings) -> Iterator[Catalog]:
    with Catalog.open(settings) as catalog:
        base = BaseModel(BASE, {"model_type": "llama"}, {Q_PROJ: (4, 4)}, None, 16, "test")
        catalog.register_base_model(base, actor="test")
        catalog.create_tenant("acme", actor="test")
        yield catalog


@contextlib.contextmanager
def process(settings: Settings, engine_socket: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "manylora.gateway", "--engine-socket", str(engine_socket), "--base-model", BASE]
    env = {**os.environ, "MANYLORA_HOME": str(settings.home), "MANYLORA_PORT": str(port)}
    env["MANYLORA_ADAPTER_ROOTS"] = str(settings.adapter_roots[0])
    log = settings.home / "gateway.log"
    with log.open("wb") as out, subprocess.Popen(argv, env=env, stdout=out, stderr=out) as child:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, verify=False) as client:
                wait_for(client, child, log)
                yield child, client
        finally:
            child.kill()


def wait_for(client: httpx.Client, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and child.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/healthz").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def adapter_folder(root: Path, fill: bytes) -> Path:
    """The smallest PEFT folder: rank 1 on one projection of 4 x 4."""
    folder = root / f"adapter-{fill.hex()}"
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 1,
        "lora_alpha": 1,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": BASE,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    prefix = f"base_model.model.{Q_PROJ}"
    shapes = {"lora_A": [1, 4], "lora_B": [4, 1]}
    header = {
        f"{prefix}.{part}.weight": {"dtype": "F32", "shape": shape, "data_offsets": [16 * n, 16 * n + 16]}
        for n, (part, shape) in enumerate(shapes.items())
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    (folder / "adapter_model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + fill * 32)
    return folder


def test_changes_by_other_processes_count_at_once(
    settings: Settings, registry: Catalog, engine: FakeEngine, engine_socket: Path
) -> None:
    root = settings.adapter_roots[0]
    key, info = registry.create_key("acme", actor="test")
    admin, _ = registry.create_key("acme", is_admin=True, actor="test")
    name = AdapterName("acme", "support")
    registry.publish(adapter_folder(root, b"\1"), name, base_model=BASE, actor="test")
    with process(settings, engine_socket) as (_, client), running(engine_server(engine, engine_socket)):

        def ask(model: str = "support") -> httpx.Response:
            body = {"model": model, "prompt": "x"}
            return client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

        def manage(verb: str, **fields: Any) -> httpx.Response:
            body = {"lora_name": "loaded", **fields}
            return client.post(f"/v1/{verb}_lora_adapter", json=body, headers={"x-api-key": admin})

        assert client.get("/readyz").status_code == 200
        assert ask().headers["x-manylora-version"] == "acme/support@v1"
        registry.publish(adapter_folder(root, b"\2"), name, base_model=BASE, actor="test", promote=True)
        assert ask().headers["x-manylora-version"] == "acme/support@v2"
        registry.rollback(name, actor="test")
        assert ask().headers["x-manylora-version"] == "acme/support@v1"
        assert ask("support@v2").status_code == 200
        loaded = manage("load", lora_path=str(adapter_folder(root, b"\3")))
        assert loaded.status_code == 200, loaded.text
        assert ask("loaded").json()["model"] == "loaded"
        assert manage("load", lora_path=str(root / "adapter-03")).status_code == 400
        assert manage("unload").status_code == 200
        assert ask("loaded").status_code == 404
        assert manage("unload").status_code == 404
        assert manage("load", lora_path=str(root)).status_code == 400
        registry.revoke_key(info.key_id, actor="test")
        assert ask().status_code == 401


def test_the_end_of_a_process(settings: Settings, registry: Catalog, engine: FakeEngine, engine_socket: Path) -> None:
    """Streams that run get a while, then an error event; nothing new begins; five seconds in all."""
    key, _ = registry.create_key("acme", actor="test")
    engine.behaviour = lambda request, body: engine.hang(event_of(body, "a"))(request, body)
    body = {"model": BASE, "prompt": "x", "stream": True}
    with process(settings, engine_socket) as (child, client), running(engine_server(engine, engine_socket)):
        with client.stream("POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}) as answer:
            chunks = answer.iter_text()
            assert json.loads(next(chunks).removeprefix("data: "))["model"] == BASE
            told = time.monotonic()
            child.send_signal(signal.SIGTERM)
            last = "".join(chunks)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert child.wait(10) == 0
        assert 2 < time.monotonic() - told < 6
    lines = [json.loads(line) for line in (settings.home / "gateway.log").read_text().splitlines()]
    assert {line["process"] for line in lines} == {"gateway"}
    assert "listening" in {line["message"] for line in lines}


def test_an_idle_process_ends_at_once(settings: Settings, registry: Catalog, engine_socket: Path) -> None:
    with process(settings, engine_socket) as (child, client):
        assert client.get("/readyz").status_code == 503
        told = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0
        assert time.monotonic() - told < 3


def test_a_taken_port_and_wrong_settings_are_one_line(settings: Settings, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{port}"):
            bind("127.0.0.1", port)
        argv = [sys.executable, "-m", "manylora.gateway", "--engine-socket", str(tmp_path / "e"), "--base-model", BASE]
        env = {**os.environ, "MANYLORA_HOME": str(settings.home)}
        ended = subprocess.run(
            argv, env={**env, "MANYLORA_PORT": str(port)}, capture_output=True, timeout=60, text=True
        )
        assert ended.returncode == 1 and "cannot listen" in json.loads(ended.stderr)["message"]
        ended = subprocess.run(argv, env={**env, "MANYLORA_PORT": "x"}, capture_output=True, timeout=60, text=True)
        assert ended.returncode == 2 and "MANYLORA_PORT" in ended.stderr and len(ended.stderr.splitlines()) == 1
