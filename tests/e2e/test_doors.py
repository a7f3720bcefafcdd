"""Whatever comes through a door that shouldn't: the right error each time, and the next good request is served."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import evil, processes, recipes
from harness.asking import question, request_fields, sync_client
from harness.stack import BODY_LIMIT_BYTES, RIVAL, TENANT, Stack
from harness.zoo import BASE, Zoo

from manylora.adapter import AdapterName

GOOD = "r4"
OTHERS = f"{RIVAL}/secret"
WRONG_NAMES = {
    "parent": "../x",
    "deep parent": "acme/../../../../etc/passwd",
    "absolute": "/etc/passwd",
    "file url": "file:///etc/passwd",
    "10 kB": "a" * 10_240,
    "emoji": "🦙/🦙",
    "empty": "",
    "blank": " ",
    "nul": "acme/r4\x00",
    "newline": "acme/r4\n",
    "case": "ACME/R4",
    "slashes": "acme/r4/x",
    "no such": "acme/nobody",
    "no such version": "acme/r4@v99",
    "version zero": "acme/r4@v0",
    "huge version": "acme/r4@v999999999999999999999",
    "no such alias": "acme/r4@nowhere",
    "another tenant's": OTHERS,
    "another tenant's version": f"{OTHERS}@v1",
}
BAD_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "not json": b"hello",
    "cut off": b'{"model": "tiny-llama", "prompt": [1, 2',
    "not utf-8": b'{"model": "\xff\xfe"}',
    "a list": b"[1, 2, 3]",
    "no model": b'{"prompt": [65], "max_tokens": 1}',
    "model is a number": b'{"model": 7, "prompt": [65]}',
    "two models": b'{"model": "tiny-llama", "prompt": [65], "model": "acme/r4"}',
    "nested": b'{"model": "tiny-llama", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no prompt": b'{"model": "tiny-llama", "max_tokens": 1}',
    "negative length": b'{"model": "tiny-llama", "prompt": [65], "max_tokens": -5}',
    "too long": b'{"model": "tiny-llama", "prompt": [65], "max_tokens": 1000000}',
    "token out of range": b'{"model": "tiny-llama", "prompt": [999999], "max_tokens": 1}',
}


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, headers={"authorization": f"Bearer {stack.key}"}, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def good_request_after_each(stack: Stack, zoo: Zoo) -> Iterator[None]:
    """After each attempt the same processes serve the next good request, right."""
    stack.publish(GOOD)
    stack.publish("r32", "secret", tenant=RIVAL)
    engine, gateway = stack.engine_pids(), stack.gateway_pid()
    yield
    with sync_client(stack) as client:
        for name in (GOOD, BASE):
            asked = question(name, zoo.group("short")[0])
            reply: Any = client.completions.create(**request_fields(asked), extra_body={"return_token_ids": True})
            assert tuple(reply.choices[0].token_ids) == asked.reference
    assert (stack.engine_pids(), stack.gateway_pid()) == (engine, gateway)


# Names


@pytest.mark.parametrize("name", WRONG_NAMES.values(), ids=WRONG_NAMES.keys())
def test_wrong_names(http: httpx.Client, name: str) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
    ):
        error = _error(http.post(path, json={"model": name, **body}), 404)
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert len(error["message"]) < 300


def test_absent_and_forbidden_look_the_same(http: httpx.Client, stack: Stack) -> None:
    texts = []
    for name in (OTHERS, f"{RIVAL}/nothing"):
        reply = http.post("/v1/completions", json={"model": name, "prompt": "hello"})
        texts.append(reply.text.replace(name, "NAME"))
        assert reply.status_code == 404
    assert texts[0] == texts[1]
    listed = http.get("/v1/models").text
    assert OTHERS not in listed
    assert http.get(f"/v1/models/{OTHERS}").status_code == 404


async def test_a_grant_opens_and_its_end_closes(stack: Stack, zoo: Zoo, http: httpx.Client) -> None:
    asked = question("r32", zoo.group("short")[0], model=OTHERS)
    body = {**request_fields(asked), "return_token_ids": True}
    stack.catalog.grant(TENANT, RIVAL, "sec*", actor="tests")
    reply = http.post("/v1/completions", json=body)
    assert tuple(reply.raise_for_status().json()["choices"][0]["token_ids"]) == asked.reference
    assert OTHERS in http.get("/v1/models").text
    stack.catalog.revoke_grant(TENANT, RIVAL, "sec*", actor="tests")
    _error(http.post("/v1/completions", json=body), 404)


def test_identity_headers_of_clients_are_ignored(http: httpx.Client) -> None:
    forged = {"x-tenant": RIVAL, "x-manylora-tenant": RIVAL, "x-forwarded-user": RIVAL, "openai-organization": RIVAL}
    _error(http.post("/v1/completions", json={"model": OTHERS, "prompt": "hi", "user": RIVAL}, headers=forged), 404)


# Keys


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer sk-wrong", "Basic YTpi", "sk-bare", "Bearer " + "x" * 5000])
def test_without_a_good_key(stack: Stack, header: str) -> None:
    headers = {"authorization": header} if header else {}
    for method, path in (("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
        body = {"model": recipes.BASE_NAME, "prompt": "hello"} if method == "POST" else None
        reply = httpx.request(method, f"{stack.url}{path}", json=body, headers=headers)
        assert _error(reply, 401)["code"] == "invalid_api_key"


def test_a_revoked_key_is_closed_at_once(stack: Stack) -> None:
    key, info = stack.catalog.create_key(TENANT, label="short-lived", actor="tests")
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.get(f"{stack.url}/v1/models", headers=headers).status_code == 200
    stack.catalog.revoke_key(info.key_id, actor="tests")
    assert httpx.get(f"{stack.url}/v1/models", headers=headers).status_code == 401


# Bodies


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_bad_bodies(http: httpx.Client, body: bytes) -> None:
    reply = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert 400 <= reply.status_code < 500
    assert len(_error(reply, reply.status_code)["message"]) < 2000


def test_a_huge_body(http: httpx.Client) -> None:
    body = b'{"model": "tiny-llama", "prompt": "' + b"x" * (2 * BODY_LIMIT_BYTES) + b'"}'
    _error(http.post("/v1/completions", content=body), 413)


def test_a_huge_body_without_a_length(http: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"model": "tiny-llama", "prompt": "'
        for _ in range(2 * BODY_LIMIT_BYTES // 65536):
            yield b"x" * 65536

    _error(http.post("/v1/completions", content=endless()), 413)


# Adapters


@pytest.mark.parametrize("spoil", evil.EVIL, ids=lambda spoil: spoil.__name__)
def test_evil_adapters_by_the_load_route(stack: Stack, zoo: Zoo, spoil: Callable[[Path], None]) -> None:
    folder = _spoiled(stack, zoo, spoil)
    name = f"{TENANT}/evil-{spoil.__name__.replace('_', '-')}"
    error = _error(_load(stack, name, folder), 400, 403)
    assert "\n" not in error["message"]
    assert not (folder / "exploded").exists()
    _assert_never_published(stack, name)


@pytest.mark.parametrize(
    "spoil",
    [evil.truncated, evil.pickle_only, evil.unknown_modules, evil.shapes_transposed],
    ids=lambda spoil: spoil.__name__,
)
def test_evil_adapters_by_push(stack: Stack, zoo: Zoo, spoil: Callable[[Path], None]) -> None:
    """One line that says what is wrong and one that says what to do, and an exit code that scripts can see."""
    folder = _spoiled(stack, zoo, spoil)
    name = f"{TENANT}/evil-push-{spoil.__name__.replace('_', '-')}"
    pushed = stack.cli("adapter", "push", str(folder), name)
    said = (pushed.stdout + pushed.stderr).strip()
    assert pushed.returncode != 0, said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 4, said
    assert not (folder / "exploded").exists()
    if spoil is evil.pickle_only:
        assert "pickle" in said
    _assert_never_published(stack, name)


@pytest.mark.parametrize(
    "path", ["/etc", "/etc/passwd", "roots/../..", "../../etc", "", "relative", "\x00", "/" + "x" * 5000]
)
def test_paths_outside_the_roots(stack: Stack, path: str) -> None:
    given = f"{stack.home}/{path}" if path.startswith("roots") else path
    _error(_load(stack, f"{TENANT}/outside", given), 400, 403, 404)
    _assert_never_published(stack, f"{TENANT}/outside")


def test_load_and_unload_by_vllms_routes(stack: Stack, zoo: Zoo, http: httpx.Client) -> None:
    folder = stack.settings.adapter_roots[0] / "good"
    shutil.copytree(zoo.adapter("rslora"), folder, dirs_exist_ok=True)
    name = f"{TENANT}/by-route"
    assert _load(stack, name, folder).status_code == 200
    asked = question("rslora", zoo.group("short")[0], model=name)
    body = {**request_fields(asked), "return_token_ids": True}
    assert tuple(http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]) == asked.reference
    _error(_load(stack, name, folder), 400)
    unloaded = _admin(stack, "/v1/unload_lora_adapter", {"lora_name": name})
    assert unloaded.status_code == 200
    _error(http.post("/v1/completions", json=body), 404)
    _error(_admin(stack, "/v1/unload_lora_adapter", {"lora_name": name}), 404)
    assert not [entry for entry in stack.residency() if str(entry["engine_name"]).startswith(f"{name}@")]


# Routes


def test_management_needs_an_admin_key(http: httpx.Client, stack: Stack) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": f"{TENANT}/{GOOD}", "lora_path": str(stack.settings.adapter_roots[0])}
        _error(http.post(path, json=body), 403)
        assert httpx.post(f"{stack.url}{path}", json=body).status_code == 401


ENGINE_ONLY = (
    "/adapters", "/load_lora_adapter", "/unload_lora_adapter", "/invocations", "/v1/adapters", "/collective_rpc",
    "/sleep", "/reset_prefix_cache", "/server_info", "/manylora/v1/residency", "/manylora/v1/evict", "/tokenize",
    "/pooling", "/docs", "/openapi.json", "/v1//load_lora_adapter", "/v1/../adapters",
)  # fmt: skip


@pytest.mark.parametrize("path", ENGINE_ONLY)
def test_the_engines_other_routes_are_not_there(stack: Stack, path: str) -> None:
    body = {"lora_name": "x", "lora_path": str(stack.zoo.adapter(GOOD)), "engine_name": "x"}
    for key in (stack.key, stack.keys["admin"]):
        headers = {"authorization": f"Bearer {key}"}
        for method in ("GET", "POST"):
            reply = httpx.request(method, f"{stack.url}{path}", json=body, headers=headers)
            assert reply.status_code in (404, 405), f"{method} {path}: {reply.status_code} {reply.text[:200]}"


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/adapters/x"])
def test_the_engine_itself_has_no_load_route(stack: Stack, path: str) -> None:
    body = {
        "lora_name": "x",
        "lora_path": str(stack.zoo.adapter(GOOD)),
        "name": "x",
        "src": str(stack.zoo.adapter(GOOD)),
    }
    with stack.engine_client() as engine:
        for method in ("POST", "DELETE"):
            assert engine.request(method, path, json=body).status_code in (404, 405)


@pytest.mark.parametrize("model", ["../x", "/etc/passwd", "acme/r4", "acme/r4@v1-0000000000000000", "🦙", "a" * 10_240])
def test_the_engine_answers_wrong_names_with_404(stack: Stack, model: str) -> None:
    with stack.engine_client() as engine:
        reply = engine.post("/v1/completions", json={"model": model, "prompt": "hello", "max_tokens": 1})
    assert reply.status_code in (400, 404), reply.text
    assert reply.json()["error"]["message"]


def test_the_engine_is_reached_by_its_socket_only(stack: Stack) -> None:
    addresses = processes.listening_addresses(stack.engine_pids())
    assert [address for address in addresses if not processes.is_loopback(address)] == []
    run_dir = stack.settings.run_dir
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_ISSOCK((run_dir / "engine.sock").stat().st_mode)


def _error(reply: httpx.Response, *statuses: int) -> dict[str, Any]:
    """The error of a reply in OpenAI's shape, with one of `statuses`; it shows no traceback and no path of ours."""
    assert reply.status_code in statuses, f"{reply.status_code}: {reply.text[:500]}"
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in reply.text
    assert reply.headers["x-request-id"]
    return error


def _spoiled(stack: Stack, zoo: Zoo, spoil: Callable[[Path], None]) -> Path:
    folder = stack.settings.adapter_roots[0] / f"{spoil.__name__}"
    shutil.rmtree(folder, ignore_errors=True)
    return evil.spoiled_copy(zoo.adapter(GOOD), folder, spoil)


def _load(stack: Stack, name: str, folder: Path | str) -> httpx.Response:
    return _admin(stack, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})


def _admin(stack: Stack, path: str, body: dict[str, str]) -> httpx.Response:
    headers = {"authorization": f"Bearer {stack.keys['admin']}"}
    return httpx.post(f"{stack.url}{path}", json=body, headers=headers, timeout=60)


def _assert_never_published(stack: Stack, name: str) -> None:
    assert AdapterName.parse(name) not in [info.name for info in stack.catalog.adapters()]
