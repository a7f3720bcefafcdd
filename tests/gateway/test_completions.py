"""From a client to the engine and back: official clients, streams, departures, failures."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_fakes import BASE, FakeEngine, engine_error, engine_server, event_of, pieces, running, stream_of, whole_of
from gateway_world import ADMIN_KEY, KEY, World
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

from manylora.errors import CorruptBlob, Unavailable

HI: Any = [{"role": "user", "content": "hi"}]
BEARER = {"authorization": f"Bearer {KEY}"}


def events(text: str) -> list[str]:
    return [part.removeprefix("data: ") for part in text.split("\n\n") if part]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error, dict)
    return error


# ---- official clients


def test_the_official_client(world: World) -> None:
    with openai.OpenAI(base_url=f"{world.url}/v1", api_key=KEY, max_retries=0) as client:
        whole = client.chat.completions.create(model="support", messages=HI)
        assert (whole.model, whole.choices[0].message.content) == ("support", "hello")
        stream = client.chat.completions.create(model="acme/support", messages=HI, stream=True)
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
        assert {chunk.model for chunk in chunks} == {"acme/support"}
        assert client.completions.create(model=BASE, prompt="x").model == BASE
        assert [model.id for model in client.models.list()] == [BASE, "acme/support"]
        assert client.models.retrieve("acme/support").id == "acme/support"
        with pytest.raises(openai.NotFoundError) as absent:
            client.chat.completions.create(model="absent", messages=HI)
        assert absent.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError) as unknown:
            client.with_options(api_key="sk-no").chat.completions.create(model="support", messages=HI)
        assert unknown.value.code == "invalid_api_key"


async def test_the_official_async_client(world: World) -> None:
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY, max_retries=0) as client:

        async def ask(model: str) -> tuple[str, str]:
            stream = await client.chat.completions.create(model=model, messages=HI, stream=True)
            chunks = [chunk async for chunk in stream]
            return chunks[0].model, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        models = ["support", BASE, "acme/support", "support@v1"] * 8
        assert await asyncio.gather(*map(ask, models)) == [(model, "hello") for model in models]


def test_every_other_field_passes_byte_for_byte(world: World) -> None:
    rest = (
        b'"messages":[{"role":"user","content":"\\u00e9\xc3\xa9","model":"support"}],"temperature":0.10,"seed":1e0,'
        b'"tools":[{"type":"function","function":{"name":"f","parameters":{"model":"support"}}}], "n" : 2,'
        b'"response_format":{"type":"json_object"},"stop":["\\n"],"logprobs":true,"vllm_xargs":{"a":1},"unknown":[]}'
    )
    assert world.post(content=b'{"model" :"support" ,' + rest).status_code == 200
    engine_name = world.catalog.held[next(iter(world.catalog.held))].versions[0].ref.engine_name
    assert world.engine.requests[-1][2] == b'{"model" :"' + engine_name.encode() + b'" ,' + rest


def test_only_listed_headers_reach_the_engine(world: World) -> None:
    sent = {
        "traceparent": "00-1-2-01", "tracestate": "a=b", "accept": "application/json", "cookie": "a=b",
        "x-request-id": "abc", "x-session-id": "s", "x-forwarded-for": "1.2.3.4", "x-user": "r",
        "user-agent": "me", "x-tenant": "globex",
    }  # fmt: skip
    world.chat("support", headers=sent)
    path, got, _ = world.engine.requests[-1]
    assert path == "/v1/chat/completions"
    assert got.keys() <= {
        "host", "content-type", "content-length", "accept", "accept-encoding", "traceparent", "tracestate",
        "x-request-id",
    }  # fmt: skip
    assert got["traceparent"] == "00-1-2-01" and got["content-type"] == "application/json"
    assert got["x-request-id"].startswith("abc-") and len(got["x-request-id"]) > 10


def test_two_requests_with_one_id_have_two_for_the_engine(world: World) -> None:
    for _ in range(2):
        world.chat("support", headers={"x-request-id": "same"})
    first, second = (headers["x-request-id"] for _, headers, _ in world.engine.requests)
    assert first != second


def test_the_query_never_reaches_the_engine(world: World) -> None:
    assert world.post("/v1/completions?lora_path=/etc", json={"model": BASE, "prompt": "x"}).status_code == 200
    assert world.engine.requests[-1][0] == "/v1/completions"


# ---- answers


def test_a_stream_in_odd_chunks(world: World) -> None:
    def behaviour(request: Any, body: dict[str, Any]) -> Any:
        source = event_of(body, "a\n\nb 🦙") + event_of(body, f'"model":"{body["model"]}"') + b"data: [DONE]\n\n"
        return pieces(*(source[i : i + 7] for i in range(0, len(source), 7)))

    world.engine.behaviour = behaviour
    answer = world.chat("support", stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    assert [json.loads(chunk)["model"] for chunk in chunks] == ["support"] * 2
    said = [json.loads(chunk)["choices"][0]["delta"]["content"] for chunk in chunks]
    assert said == ["a\n\nb 🦙", f'"model":"{world.engine.last_body["model"]}"']


def test_an_answer_of_the_base_model_never_stands_for_an_adapter(world: World) -> None:
    world.engine.behaviour = lambda request, body: JSONResponse(whole_of({**body, "model": BASE}))
    answer = world.chat("support")
    assert answer.status_code == 502 and error_of(answer)["code"] == "wrong_model"
    world.engine.behaviour = lambda request, body: stream_of({**body, "model": BASE})
    answer = world.chat("support", stream=True)
    assert answer.status_code == 502 and "hello" not in answer.text


def test_errors_of_the_engine_keep_their_meaning(world: World) -> None:
    world.engine.behaviour = lambda request, body: engine_error(400, f"{body['model']}: max_tokens must be positive")
    answer = world.chat("support", stream=True)
    assert answer.status_code == 400
    assert error_of(answer) == {
        "message": "support: max_tokens must be positive", "type": "invalid_request_error", "param": None, "code": None,
    }  # fmt: skip
    world.engine.behaviour = lambda request, body: PlainTextResponse("Traceback: /opt/x.py", 500)
    answer = world.chat("support")
    assert answer.status_code == 500 and error_of(answer)["code"] == "engine_error" and "/opt" not in answer.text


def test_a_failure_of_a_dying_engine_is_no_failure_of_the_request(world: World) -> None:
    world.engine.behaviour = lambda request, body: engine_error(500, "EngineCore encountered an issue.")
    world.engine.healthy = False
    answer = world.chat("support")
    assert answer.status_code == 503 and error_of(answer)["code"] == "service_unavailable"
    assert int(answer.headers["retry-after"]) >= 1
    event = (
        b'data: {"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","code":500}}\n\n'
    )
    world.engine.behaviour = lambda request, body: StreamingResponse(iter([event]), media_type="text/event-stream")
    answer = world.chat("support", stream=True)
    assert answer.status_code == 503 and error_of(answer)["code"] == "service_unavailable"
    world.engine.healthy = True
    assert error_of(world.chat("support", stream=True))["code"] == "engine_error"


def test_a_route_that_the_engine_does_not_have_for_this_model(world: World) -> None:
    world.engine.behaviour = lambda request, body: JSONResponse({"detail": "Not Found"}, 404)
    answer = world.chat("support")
    assert answer.status_code == 404 and error_of(answer)["code"] == "unsupported_path"


@pytest.mark.parametrize("status", [400, 500])
def test_a_failed_load_fails_its_own_requests_only(world: World, status: int) -> None:
    def behaviour(request: Any, body: dict[str, Any]) -> Any:
        if body["model"] == BASE:
            return JSONResponse(whole_of(body))
        where = world.settings.disk_tier
        return engine_error(status, f"{body['model']}: {where}/x: rank 64 > 32", code="adapter_load_failed")

    world.engine.behaviour = behaviour
    answer = world.chat("support")
    assert answer.status_code == 500
    assert error_of(answer)["code"] == "adapter_load_failed"
    assert error_of(answer)["message"].endswith("support: [path]: rank 64 > 32")
    assert world.chat(BASE).status_code == 200


# ---- the disk tier


def test_a_version_is_on_disk_before_the_engine_is_asked(world: World) -> None:
    version = world.catalog.add("acme/new")
    assert world.chat("new").status_code == 200
    assert world.disk_tier.path(version.digest) is not None
    assert len(world.engine.requests) == 1


def test_a_version_cleared_away_is_brought_back_once(world: World) -> None:
    assert world.chat("support").status_code == 200
    version = world.catalog.held[next(iter(world.catalog.held))].versions[0]
    world.disk_tier.remove(version.digest)
    assert world.chat("support").status_code == 200
    assert world.catalog.calls["download"] == 2
    world.engine.behaviour = lambda request, body: engine_error(404, "not here", code="adapter_not_on_disk")
    before = len(world.engine.requests)
    answer = world.chat("support")
    assert answer.status_code == 503 and error_of(answer)["code"] == "service_unavailable"
    assert len(world.engine.requests) == before + 2


async def test_many_requests_share_one_fetch_and_a_departure_does_not_stop_it(world: World) -> None:
    world.catalog.download_delay_s = 0.5
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"model": "support", "messages": HI}
    async with httpx.AsyncClient(base_url=world.url, headers=headers, timeout=10) as client:

        async def leave() -> None:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json=body, timeout=0.2)

        stay = [client.post("/v1/chat/completions", json=body) for _ in range(6)]
        _, *answers = await asyncio.gather(leave(), *stay)
    assert [answer.status_code for answer in answers] == [200] * 6
    assert world.catalog.calls["download"] == 1


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CorruptBlob("/blobs/adapters/00ff does not match"), 500, "adapter_corrupt"),
        (Unavailable("s3://bucket is away"), 503, "service_unavailable"),
        (OSError("/mnt: no space"), 503, "service_unavailable"),
    ],
)
def test_a_fetch_that_fails_is_told_without_insides(world: World, error: Exception, status: int, code: str) -> None:
    world.catalog.download_error = error
    answer = world.chat("support")
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)
    assert "/" not in error_of(answer)["message"] and world.engine.requests == []
    world.catalog.download_error = None
    assert world.chat("support").status_code == 200


# ---- departures


def leave_after_first_byte(world: World, **fields: Any) -> None:
    body = {"model": "support", "messages": HI, **fields}
    with httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=5) as client:
        if fields.get("stream"):
            with client.stream("POST", f"{world.url}/v1/chat/completions", json=body) as answer:
                next(answer.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{world.url}/v1/chat/completions", json=body, timeout=0.5)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_the_engines_request_along(world: World, stream: bool) -> None:
    def first(request: Any, body: dict[str, Any]) -> Any:
        return (world.engine.hang(event_of(body, "a")) if stream else world.engine.hang_whole())(request, body)

    world.engine.behaviour = first
    leave_after_first_byte(world, stream=stream)
    left = time.monotonic()
    while not world.engine.closed_at and time.monotonic() < left + 3:
        time.sleep(0.01)
    assert world.engine.closed_at and world.engine.closed_at[0] - left < 1
    world.engine.behaviour = None
    assert world.chat("support").status_code == 200


def long_stream(world: World, events: int, size: int) -> None:
    def behaviour(request: Any, body: dict[str, Any]) -> Any:
        async def send() -> AsyncIterator[bytes]:
            try:
                for _ in range(events):
                    yield event_of(body, "x" * size)
                yield b"data: [DONE]\n\n"
            finally:
                world.engine.closed_at.append(time.monotonic())

        return StreamingResponse(send(), media_type="text/event-stream")

    world.engine.behaviour = behaviour


def test_a_client_that_reads_slowly_gets_everything(world: World) -> None:
    long_stream(world, events=400, size=50_000)
    body = {"model": "support", "messages": HI, "stream": True}
    with world.client.stream("POST", "/v1/chat/completions", json=body, headers=BEARER) as answer:
        chunks = answer.iter_text()
        text = next(chunks)
        time.sleep(1)
        assert not world.engine.closed_at, "the engine was read although the client reads nothing"
        text += "".join(chunks)
    *said, done = events(text)
    assert done == "[DONE]" and len(said) == 400
    assert {json.loads(chunk)["choices"][0]["delta"]["content"] for chunk in said} == {"x" * 50_000}


@pytest.mark.parametrize("settings_changes", [{"upstream_timeout_s": 0.5}], indirect=True)
def test_a_client_that_reads_nothing_is_given_up(world: World) -> None:
    long_stream(world, events=400, size=50_000)
    body = {"model": "support", "messages": HI, "stream": True}
    with world.client.stream("POST", "/v1/chat/completions", json=body, headers=BEARER) as answer:
        next(answer.iter_raw())
        started = time.monotonic()
        while not world.engine.closed_at and time.monotonic() < started + 5:
            time.sleep(0.01)
        assert world.engine.closed_at and world.engine.closed_at[0] - started < 3
    assert "manylora:gateway_client_departures_total 1.0" in world.get("/metrics").text


# ---- an engine that fails


def test_an_engine_that_dies_before_it_says_anything(world: World) -> None:
    world.chat("support")
    world.engine.behaviour = lambda request, body: pieces(crash=True)
    answer = world.chat("support", stream=True)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert error_of(answer)["code"] == "service_unavailable"


def test_a_restart_of_the_engine(gateway: World, engine: FakeEngine, engine_socket: Path) -> None:
    for _ in range(2):
        started = time.monotonic()
        answer = gateway.chat("support")
        assert answer.status_code == 503
        assert time.monotonic() - started < 3, "a dead engine must not be waited for"
        assert gateway.get("/readyz").status_code == 503
        with running(engine_server(engine, engine_socket)):
            assert gateway.chat("support").status_code == 200
            assert gateway.get("/readyz").status_code == 200


def test_a_stream_that_breaks_ends_with_an_error_event(world: World) -> None:
    world.engine.behaviour = lambda request, body: pieces(event_of(body, "a"), event_of(body, "b")[:20], crash=True)
    answer = world.chat("support", stream=True)
    first, last = events(answer.text)
    assert json.loads(first)["model"] == "support"
    error = json.loads(last)["error"]
    assert error["code"] == "service_unavailable" and error["type"] == "server_error"


@pytest.mark.parametrize("tail", [b"", b"data: {\n\n"])
def test_a_stream_that_ends_wrongly_is_an_error_too(world: World, tail: bytes) -> None:
    world.engine.behaviour = lambda request, body: pieces(event_of(body, "a"), *([tail] if tail else []))
    first, last = events(world.chat("support", stream=True).text)
    assert json.loads(first)["model"] == "support" and json.loads(last)["error"]["type"] == "server_error"


def test_an_error_event_of_the_engine_is_the_last(world: World) -> None:
    def behaviour(request: Any, body: dict[str, Any]) -> Any:
        error = {
            "message": f"{body['model']} died in /opt/x",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
        return pieces(
            event_of(body, "a"), b"data: " + json.dumps({"error": error}).encode() + b"\n\n", b"data: [DONE]\n\n"
        )

    world.engine.behaviour = behaviour
    with openai.OpenAI(base_url=f"{world.url}/v1", api_key=KEY, max_retries=0) as client:
        stream = client.chat.completions.create(model="support", messages=HI, stream=True)
        assert next(stream).model == "support"
        with pytest.raises(openai.APIError, match="failed to answer"):
            next(stream)


def test_an_answer_that_breaks_before_it_is_whole(world: World) -> None:
    class Broken(JSONResponse):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [*self.raw_headers]})
            await send({"type": "http.response.body", "body": self.body[:9], "more_body": True})
            raise ConnectionResetError

    world.engine.behaviour = lambda request, body: Broken(whole_of(body))
    answer = world.chat("support")
    assert answer.status_code == 503 and error_of(answer)["code"] == "service_unavailable"


@pytest.mark.parametrize("settings_changes", [{"upstream_timeout_s": 0.3}], indirect=True)
def test_a_silent_engine_is_given_up(world: World) -> None:
    world.engine.behaviour = world.engine.hang()
    answer = world.chat("support", stream=True)
    assert answer.status_code == 504 and error_of(answer)["code"] == "engine_timeout"
    world.engine.behaviour = lambda request, body: world.engine.hang(event_of(body, "a"))(request, body)
    first, last = events(world.chat("support", stream=True).text)
    assert json.loads(first)["model"] == "support" and json.loads(last)["error"]["code"] == "engine_timeout"


def test_admin_keys_generate_too(world: World) -> None:
    assert world.chat("support", ADMIN_KEY).status_code == 200
