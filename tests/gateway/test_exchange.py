"""One log line a request, with what an operator needs and nothing that is private."""

from __future__ import annotations

import json
import logging
import time

import pytest
from gateway_fakes import event_of, pieces
from gateway_world import KEY, World

from manylora.gateway.exchange import ExchangeLog, Ledger
from manylora.gateway.metrics import GatewayMetrics
from manylora.telemetry import JsonFormatter


def lines(caplog: pytest.LogCaptureFixture, count: int) -> list[dict[str, object]]:
    """The request lines; the last may come a moment after its client has the end of its answer."""
    formatter = JsonFormatter("gateway")
    deadline = time.monotonic() + 5
    while True:
        wanted = [record for record in caplog.records if record.name == "manylora.gateway.requests"]
        if len(wanted) >= count or time.monotonic() > deadline:
            return [json.loads(formatter.format(record)) for record in wanted]
        time.sleep(0.01)


def test_a_line_tells_what_happened(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    secret = "PROMPT-TEXT"
    answer = world.post(
        json={"model": "support", "stream": True, "messages": [{"role": "user", "content": secret}]},
        headers={"x-request-id": "r-1"},
    )
    version = world.engine.last_body["model"]
    world.get("/healthz")
    (line,) = lines(caplog, 1)
    assert line | {"time": "", "ttft_s": 0, "duration_s": 0} == {
        "time": "", "level": "info", "process": "gateway", "logger": "manylora.gateway.requests", "message": "request",
        "request_id": "r-1", "route": "/v1/chat/completions", "tenant": "acme", "key_id": "key-acme", "status": 200,
        "model_kind": "adapter", "version": version, "bytes": len(answer.content), "ttft_s": 0, "duration_s": 0,
    }  # fmt: skip
    assert 0 < float(str(line["ttft_s"])) <= float(str(line["duration_s"]))
    for record in caplog.records:
        assert secret not in record.getMessage() and KEY not in str(record.__dict__)


def test_refusals_and_broken_streams_have_their_code(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world.chat("absent")
    world.chat("support", key="sk-wrong")
    world.engine.behaviour = lambda request, body: pieces(event_of(body, "a"), crash=True)
    world.chat("support", stream=True)
    told = [(line["status"], line.get("error")) for line in lines(caplog, 3)]
    assert told == [(404, "model_not_found"), (401, "invalid_api_key"), (200, "service_unavailable")]


async def test_what_no_code_expected_is_a_plain_500(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: object, receive: object, send: object) -> None:
        raise ZeroDivisionError("secret /path")

    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    metrics = GatewayMetrics()
    app = ExchangeLog(broken, Ledger(metrics))  # type: ignore[arg-type]
    await app({"type": "http", "headers": []}, None, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 500
    assert json.loads(sent[1]["body"])["error"]["code"] == "internal_error"  # type: ignore[arg-type]
    assert b"secret" not in sent[1]["body"]  # type: ignore[operator]
    assert "ZeroDivisionError" in caplog.text
    assert metrics.registry.get_sample_value("manylora:gateway_unexpected_errors_total") == 1
