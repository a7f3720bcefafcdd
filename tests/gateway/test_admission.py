"""Who gets in, what a name means, and that neither is remembered too long."""

from __future__ import annotations

import pytest
from gateway_fakes import BASE, FakeCatalog
from gateway_world import KEY, OTHER_KEY, World
from starlette.datastructures import Headers

from manylora.gateway.admission import Admission, key_of, stickiness
from manylora.gateway.registry_threads import ChangeWatch, Threads
from manylora.gateway.request_body import parse


@pytest.mark.parametrize("key", [None, "", "sk-unknown", "x" * 5000, "sk-acme-012345678", KEY + "0", "sk-\xe9"])
def test_without_a_valid_key_nobody_gets_in(world: World, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}".strip().encode("latin-1")}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/load_lora_adapter"):
        answer = world.post(path, key=None, json={"model": BASE}, headers=headers)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert world.engine.requests == []


def test_where_a_key_may_stand() -> None:
    assert key_of(Headers({"authorization": "bearer sk-a"})) == "sk-a"
    assert key_of(Headers({"x-api-key": "sk-a"})) == "sk-a"
    assert key_of(Headers({"authorization": "Basic sk-a", "x-api-key": "sk-a"})) is None
    assert key_of(Headers({"authorization": "sk-a"})) is None


def test_names_mean_the_tenants_own_adapters(world: World) -> None:
    live = world.catalog.add("acme/support")
    for asked, number in (("support", 2), ("acme/support", 2), ("support@v1", 1), ("acme/support@live", 2)):
        answer = world.chat(asked)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == asked
        assert answer.headers["x-manylora-version"] == f"acme/support@v{number}"
    assert world.engine.last_body["model"] == live.ref.engine_name


WRONG_NAMES = [
    "absent", "globex/secret", "acme/secret", "support@v9", "support@v0", "support@nope", "support@", "@v1", "", "../x",
    "/etc/passwd", "acme/../globex/secret", "x" * 10_000, "🦙", "Support", "tiny-base", "Tiny-Base ", " Tiny-Base",
    "Tiny-Base\x00", "acme/support/x", "support@v1-0123456789abcdef", "a\nb", '"}{', "globex/secret@v1", "Tiny-Base@v1",
]  # fmt: skip


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_absent_and_forbidden_and_malformed_look_the_same(world: World, name: str) -> None:
    answer = world.chat(name)
    assert answer.status_code == 404
    error = answer.json()["error"]
    quoted = error.pop("message")
    assert error == {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert quoted.startswith("The model '") and quoted.endswith("' does not exist.") and len(quoted) < 140
    assert world.engine.requests == []


def test_the_engines_own_name_of_a_version_is_no_name_for_clients(world: World) -> None:
    engine_name = world.catalog.add("globex/other").ref.engine_name
    assert world.chat(engine_name, OTHER_KEY).status_code == 404


def test_a_grant_opens_and_its_end_closes(world: World) -> None:
    assert world.chat("globex/secret").status_code == 404
    world.catalog.granted.add(("acme", "globex", "sec*"))
    world.catalog.seq += 1
    assert world.chat("globex/secret").status_code == 200
    world.catalog.granted.clear()
    world.catalog.seq += 1
    assert world.chat("globex/secret").status_code == 404


def test_an_adapter_of_another_base_model_is_absent(world: World) -> None:
    world.catalog.add("acme/foreign", base="Other-Base")
    assert world.chat("foreign").status_code == 404
    assert "acme/foreign" not in world.get("/v1/models").text


def test_a_revoked_key_and_a_moved_alias_count_from_the_next_request(world: World) -> None:
    world.catalog.add("acme/support")
    assert world.chat("support").headers["x-manylora-version"] == "acme/support@v2"
    world.catalog.promote("acme/support", 1)
    assert world.chat("support").headers["x-manylora-version"] == "acme/support@v1"
    world.catalog.revoke(KEY)
    assert world.chat("support").status_code == 401


def test_an_unchanged_registry_is_asked_only_for_its_change_number(world: World) -> None:
    for _ in range(5):
        assert world.chat("support").status_code == 200
    assert world.catalog.calls == {"change_seq": 5, "authenticate": 1, "resolve": 1, "download": 1}


def test_without_the_registry_nobody_gets_in_though_all_is_remembered(world: World) -> None:
    assert world.chat("support").status_code == 200
    world.catalog.fail = OSError("/var/lib/registry.db: disk I/O error")
    answer = world.chat("support")
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "service_unavailable"
    assert "registry.db" not in answer.text
    world.catalog.fail = None
    assert world.chat("support").status_code == 200


def test_a_canary_keeps_each_conversation_on_its_side(world: World) -> None:
    world.catalog.add("acme/support", live=False)
    world.catalog.canary("acme/support", 2, 0.5)

    def side(**headers: str) -> str:
        return world.chat("support", headers=headers).headers["x-manylora-version"]

    sides = {name: side(**{"x-session-id": name}) for name in map(str, range(24))}
    assert set(sides.values()) == {"acme/support@v1", "acme/support@v2"}
    assert all(side(**{"x-session-id": name}) == was for name, was in sides.items())
    assert world.chat("support@v1", headers={"x-session-id": "1"}).headers["x-manylora-version"] == "acme/support@v1"


def test_stickiness_follows_the_conversations_beginning_and_the_tenant() -> None:
    system, first, second = (
        f'{{"role":"{role}","content":"{text}"}}' for role, text in (("system", "s"), ("user", "a"), ("user", "b"))
    )

    def of(*messages: str, tenant: str = "acme") -> str:
        return stickiness(
            tenant, Headers({}), parse(f'{{"model":"m","messages":[{",".join(messages)}]}}'.encode()).fields
        )

    assert of(system, first) == of(system, first, second)
    assert of(system, first) != of(system, second)
    assert of(first) != of(first, tenant="globex")
    assert of("1", first) == of("1", second) != of(first)
    assert stickiness("acme", Headers({}), parse(b'{"model":"m","prompt":"x"}').fields) != of(first)


async def test_a_burst_shares_change_reads_that_began_after_it_asked(catalog: FakeCatalog) -> None:
    import asyncio

    watch = ChangeWatch(catalog, inline=False)  # type: ignore[arg-type]
    first = asyncio.ensure_future(watch.seq())
    await asyncio.sleep(0)
    burst = [asyncio.ensure_future(watch.seq()) for _ in range(20)]
    await asyncio.gather(first, *burst)
    assert catalog.calls["change_seq"] <= 2
    before = catalog.seq
    catalog.seq += 1
    assert await watch.seq() == before + 1
    watch.close()


async def test_what_was_learnt_before_a_change_is_not_kept_after_it(catalog: FakeCatalog) -> None:
    threads, watch = Threads("registry", 1), ChangeWatch(catalog, inline=True)  # type: ignore[arg-type]
    admission = Admission(catalog, threads, watch, BASE)  # type: ignore[arg-type]
    headers = Headers({"authorization": f"Bearer {KEY}"})
    old = await admission.authenticate(headers)
    catalog.seq += 1
    await admission.authenticate(headers)
    await admission.target(old, "support", lambda: "")
    catalog.held.clear()
    catalog.seq += 1
    fresh = await admission.authenticate(headers)
    with pytest.raises(Exception, match="does not exist"):
        await admission.target(fresh, "support", lambda: "")
    threads.close()
    watch.close()


async def test_one_slow_read_sends_the_rest_to_a_thread(catalog: FakeCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading
    import time

    threads: list[str] = []

    def change_seq() -> int:
        threads.append(threading.current_thread().name)
        time.sleep(0.03 if len(threads) == 2 else 0)
        return len(threads)

    monkeypatch.setattr(catalog, "change_seq", change_seq)
    watch = ChangeWatch(catalog, inline=True)  # type: ignore[arg-type]
    assert [await watch.seq() for _ in range(4)] == [1, 2, 3, 4]
    here = threading.current_thread().name
    assert threads[:2] == [here] * 2 and here not in threads[2:]
    watch.close()
