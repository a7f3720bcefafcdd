"""Probes and metrics."""

from __future__ import annotations

import pytest
from gateway_world import ADMIN_KEY, KEY, World
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

from manylora.gateway.health import from_this_machine


def test_alive_and_ready(world: World) -> None:
    assert world.get("/healthz", key=None).json() == {"status": "ok"}
    ready = world.get("/readyz", key=None)
    assert ready.status_code == 200
    assert ready.json() == {"status": "ready", "parts": {"engine": True, "registry": True, "accepting": True}}


def test_not_ready_names_the_part(world: World) -> None:
    world.engine.healthy = False
    answer = world.get("/readyz")
    assert answer.status_code == 503 and answer.json()["parts"]["engine"] is False
    world.engine.healthy = True
    world.catalog.fail = OSError("gone")
    answer = world.get("/readyz")
    assert answer.status_code == 503 and answer.json()["parts"]["registry"] is False
    assert world.get("/healthz").status_code == 200


def test_metrics_count_without_naming_anyone(world: World) -> None:
    world.chat("support")
    world.chat("support", stream=True)
    world.chat("Tiny-Base")
    for number in range(50):
        world.get(f"/nowhere/{number}")
        world.chat(f"name-{number}")
    text = world.get("/metrics", key=None).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    counted = {
        (sample.labels["model"], sample.labels["status"]): sample.value
        for sample in samples
        if sample.name == "manylora:gateway_requests_total" and sample.labels["route"] == "/v1/chat/completions"
    }
    assert counted == {("adapter", "200"): 2, ("base", "200"): 1, ("none", "404"): 50}
    assert all(sample.name.startswith("manylora:") for sample in samples)
    assert len(samples) < 200
    for name in ("acme", "support", "name-1", KEY, "nowhere"):
        assert name not in text


def test_the_engines_metrics_need_an_admin_or_this_machine(world: World) -> None:
    assert "vllm:num_loras_in_gpu" in world.get("/metrics/engine", key=None).text
    proxied = {"x-forwarded-for": "1.2.3.4"}
    assert world.get("/metrics/engine", None, **proxied).status_code == 401
    assert world.get("/metrics/engine", KEY, **proxied).status_code == 403
    assert world.get("/metrics/engine", ADMIN_KEY, **proxied).status_code == 200


def test_what_is_in_memory_needs_an_admin_or_this_machine(world: World) -> None:
    assert world.get("/admin/v1/residency", key=None).json() == {"adapters": [], "waiting": 0}
    proxied = {"x-forwarded-for": "1.2.3.4"}
    assert world.get("/admin/v1/residency", None, **proxied).status_code == 401
    assert world.get("/admin/v1/residency", KEY, **proxied).status_code == 403
    assert world.get("/admin/v1/residency", ADMIN_KEY, **proxied).status_code == 200


@pytest.mark.parametrize(
    ("client", "headers", "expected"),
    [
        (("127.0.0.1", 1), {}, True),
        (("::1", 1), {}, True),
        (("10.0.0.1", 1), {}, False),
        (("unix", 1), {}, False),
        (None, {}, False),
        (("127.0.0.1", 1), {"forwarded": "for=1.2.3.4"}, False),
        (("127.0.0.1", 1), {"via": "x"}, False),
    ],
)
def test_this_machine(client: tuple[str, int] | None, headers: dict[str, str], expected: bool) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert from_this_machine(Request({"type": "http", "client": client, "headers": raw})) is expected
