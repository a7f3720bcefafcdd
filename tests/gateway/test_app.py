"""Which paths exist, and what every answer has in common."""

from __future__ import annotations

import pytest
from gateway_world import World


def test_nothing_else_of_the_engine_is_reachable(world: World) -> None:
    for path in (
        "/adapters",
        "/manylora/v1/evict",
        "/manylora/v1/residency",
        "/health",
        "/tokenize",
        "/v1/",
        "/",
        "/x",
    ):
        for answer in (world.post(path, json={"model": "Tiny-Base"}), world.get(path)):
            assert answer.status_code == 404, path
            assert answer.json()["error"]["code"] == "not_found"
    assert world.engine.requests == [] and world.engine.evicted == []


@pytest.mark.parametrize(
    "path",
    ["/v1/../adapters", "/v1/chat/completions/../../../adapters", "/v1/%2e%2e/adapters", "//adapters", "/v1//models"],
)
def test_a_path_is_never_normalised_into_another(world: World, path: str) -> None:
    import http.client

    connection = http.client.HTTPConnection(world.url.removeprefix("http://"))
    connection.request("POST", path, b"{}", {"authorization": "Bearer sk-acme-0123456789"})
    assert connection.getresponse().status == 404
    connection.close()


def test_a_wrong_method_has_an_openai_body(world: World) -> None:
    answer = world.get("/v1/chat/completions")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_a_request_id_is_on_every_answer(world: World) -> None:
    for answer in (world.get("/healthz"), world.get("/nowhere"), world.get("/v1/models", key=None), world.chat("nope")):
        assert answer.headers["x-request-id"].startswith("req-")
    assert world.chat("support", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("bad", ["x" * 129, "a b", "café".encode().decode("latin-1"), ""])
def test_an_unusable_request_id_is_replaced(world: World, bad: str) -> None:
    answer = world.get("/healthz", **{"x-request-id": bad.encode("latin-1")})  # type: ignore[arg-type]
    assert answer.headers["x-request-id"].startswith("req-")
