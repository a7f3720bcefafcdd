"""What a key may see."""

from __future__ import annotations

from gateway_fakes import BASE
from gateway_world import KEY, OTHER_KEY, World


def test_the_list_is_what_the_key_may_call(world: World) -> None:
    world.catalog.granted.add(("globex", "acme", "supp*"))
    world.catalog.add("acme/hidden")
    seen = {key: [card["id"] for card in world.get("/v1/models", key).json()["data"]] for key in (KEY, OTHER_KEY)}
    assert seen == {
        KEY: [BASE, "acme/support", "acme/hidden"],
        OTHER_KEY: [BASE, "acme/support", "globex/secret"],
    }


def test_cards_have_openais_and_vllms_fields(world: World) -> None:
    listed = world.get("/v1/models").json()
    assert listed["object"] == "list"
    base, adapter = listed["data"]
    assert base | {"created": 0} == {
        "id": BASE, "object": "model", "created": 0, "owned_by": "manylora", "root": BASE, "parent": None,
    }  # fmt: skip
    assert adapter == {
        "id": "acme/support", "object": "model", "created": 1767312000, "owned_by": "acme", "root": "acme/support@v1",
        "parent": BASE,
    }  # fmt: skip


def test_the_list_follows_changes(world: World) -> None:
    assert len(world.get("/v1/models").json()["data"]) == 2
    assert world.catalog.calls["visible"] == 1
    world.get("/v1/models")
    assert world.catalog.calls["visible"] == 1
    world.catalog.add("acme/new")
    assert len(world.get("/v1/models").json()["data"]) == 3


def test_one_card_under_any_name_of_it(world: World) -> None:
    world.catalog.add("acme/support", live=False)
    for asked, root in {"support": 1, "acme/support": 1, "support@v2": 2, "acme%2Fsupport@live": 1}.items():
        card = world.get(f"/v1/models/{asked}").json()
        assert (card["id"], card["root"]) == (asked.replace("%2F", "/"), f"acme/support@v{root}")
    assert world.get(f"/v1/models/{BASE}").json()["parent"] is None


def test_absent_and_forbidden_cards(world: World) -> None:
    answers = {
        name: world.get(f"/v1/models/{name}") for name in ("absent", "globex/secret", "..%2f..%2fetc", "%F0%9F%A6%99")
    }
    assert {answer.status_code for answer in answers.values()} == {404}
    assert {answer.json()["error"]["code"] for answer in answers.values()} == {"model_not_found"}
    assert world.get("/v1/models", key=None).status_code == 401
