"""`manylora adapter …` against a real registry in a temporary home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
Peft = Callable[..., Path]


def test_push_list_show(seeded: Cli, peft: Peft) -> None:
    pushed = seeded("adapter", "push", peft(), "acme/support", "--meta", "run=7")
    assert pushed.code == 0, pushed.err
    assert "acme/support@v1 published" in pushed.out
    assert "it is live" in pushed.out

    listed = seeded("adapter", "list")
    assert listed.out.splitlines()[0].split() == ["NAME", "LIVE", "CANARY", "VERSIONS", "BASE", "MODEL"]
    assert listed.out.splitlines()[1].split() == ["acme/support", "v1", "-", "1", "tiny"]

    shown = seeded("adapter", "show", "acme/support").out
    assert "live v1" in shown
    assert "run=7" in shown


def test_the_tenant_is_default_and_comes_into_being(seeded: Cli, peft: Peft) -> None:
    assert "default/support@v1" in seeded("adapter", "push", peft(), "support").out
    names = {tenant["name"] for tenant in seeded("tenant", "list", "--json").json["tenants"]}
    assert names == {"acme", "default"}
    assert seeded("adapter", "show", "support").code == 0


def test_a_tenant_other_than_default_must_exist(seeded: Cli, peft: Peft) -> None:
    pushed = seeded("adapter", "push", peft(), "nobody/support")
    assert pushed.code == 4
    assert pushed.err.startswith("error: ")
    assert "\nhint: " in pushed.err


def test_push_json(seeded: Cli, peft: Peft) -> None:
    pushed = seeded("adapter", "push", peft(), "acme/support", "--meta", "run=7", "--json").json
    assert pushed["version"] == "acme/support@v1"
    assert pushed["engine_name"] == f"acme/support@v1-{pushed['digest'][:16]}"
    assert (pushed["number"], pushed["created"], pushed["became_live"], pushed["lora_rank"]) == (1, True, True, 2)
    assert (pushed["aliases"], pushed["metadata"], pushed["warnings"]) == (["live"], {"run": "7"}, [])
    assert (pushed["base_model"], pushed["state"]) == ("tiny", "ready")
    assert pushed["created_at"].endswith("Z")
    assert pushed["created_by"].startswith("cli:")


def test_the_same_content_is_the_same_version(seeded: Cli, peft: Peft) -> None:
    first = seeded("adapter", "push", peft(), "acme/support", "--json").json
    again = seeded("adapter", "push", peft(), "acme/support", "--json").json
    assert (again["number"], again["created"]) == (first["number"], False)
    assert "already published, unchanged" in seeded("adapter", "push", peft(), "acme/support").out


def test_promote_and_rollback(seeded: Cli, peft: Peft) -> None:
    seeded("adapter", "push", peft(0.1), "acme/support")
    second = seeded("adapter", "push", peft(0.2), "acme/support")
    assert "live is v1; to serve this one: manylora adapter promote acme/support@v2" in second.out
    assert seeded("adapter", "promote", "acme/support@v2").out == "acme/support@v2 is live\n"
    assert seeded("adapter", "rollback", "acme/support", "--json").json == {"name": "acme/support", "live": 1}
    assert "it is live" in seeded("adapter", "push", peft(0.3), "acme/support", "--promote").out
    nothing_earlier = seeded("adapter", "rollback", "acme/support")
    assert nothing_earlier.code == 0
    assert seeded("adapter", "rollback", "acme/support").code == 5


def test_canary(seeded: Cli, peft: Peft) -> None:
    for fill in (0.1, 0.2):
        seeded("adapter", "push", peft(fill), "acme/support")
    assert "gets 5% of the requests" in seeded("adapter", "canary", "acme/support@v2", "5%").out
    assert "v2 5%" in seeded("adapter", "list").out
    (listed,) = seeded("adapter", "list", "--json").json["adapters"]
    assert (listed["aliases"], listed["canary_weight"]) == ({"live": 1, "canary": 2}, 0.05)
    assert seeded("adapter", "canary", "acme/support", "off").out == "acme/support has no canary\n"
    assert seeded("adapter", "list", "--json").json["adapters"][0]["aliases"] == {"live": 1}


@pytest.mark.parametrize("share", ["5", "0%", "101%", "nan%", "%", "0.05", "five%", "-1%", "-0.5%", "-x"])
def test_a_share_is_a_percentage(seeded: Cli, share: str) -> None:
    outcome = seeded("adapter", "canary", "acme/support@v2", share)
    assert outcome.code == 3
    assert f"error: '{share}' is not a share of the requests\n" in outcome.err
    assert "hint: write a percentage above 0% and up to 100%, such as 5%, or off" in outcome.err


@pytest.mark.parametrize("command", [("promote", "acme/support"), ("canary", "acme/support@live", "5%")])
def test_a_version_must_be_named(seeded: Cli, command: tuple[str, ...]) -> None:
    outcome = seeded("adapter", *command)
    assert outcome.code == 3
    assert "hint: write acme/support@vN" in outcome.err


def test_remove(seeded: Cli, peft: Peft) -> None:
    seeded("adapter", "push", peft(0.1), "acme/support")
    assert seeded("adapter", "remove", "acme/support").out == "removed acme/support\n"
    assert seeded("adapter", "list", "--json").json == {"adapters": []}
    assert seeded("adapter", "remove", "acme/support").code == 4
    assert "acme/support@v2" in seeded("adapter", "push", peft(0.2), "acme/support").out


def test_verify(seeded: Cli, peft: Peft, home: Path) -> None:
    seeded("adapter", "push", peft(0.1), "acme/support")
    digest = seeded("adapter", "push", peft(0.2), "acme/support", "--json").json["digest"]
    sound = seeded("adapter", "verify")
    assert (sound.code, sound.out.splitlines()[-1]) == (0, "2 versions checked, 0 damaged")

    (blob,) = (path for path in (home / "blobs").rglob("adapter_model.safetensors") if digest in str(path))
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.chmod(0o600)
    blob.write_bytes(content)
    damaged = seeded("adapter", "verify", "acme/support", "--json")
    assert damaged.code == 7
    assert (damaged.json["checked"], damaged.json["damaged"]) == (2, 1)
    assert {r["version"]: r["ok"] for r in damaged.json["results"]} == {
        "acme/support@v1": True,
        "acme/support@v2": False,
    }
    assert "DAMAGED  acme/support@v2" in seeded("adapter", "verify").out


def test_a_bad_folder_is_refused_with_a_hint(seeded: Cli, peft: Peft, tmp_path: Path) -> None:
    wrong_shape = seeded("adapter", "push", peft(0.5, 4), "acme/support")
    assert wrong_shape.code == 3
    assert wrong_shape.err.count("\n") <= 2
    assert "q_proj" in wrong_shape.err
    assert seeded("adapter", "push", tmp_path / "none", "acme/support").code in (3, 4)


@pytest.mark.parametrize("name", ["../x", "/etc", "acme/Ünicode", "acme/", "", "a" * 10_000, "acme/x/y", "acme/🤖"])
def test_bad_names(seeded: Cli, peft: Peft, name: str) -> None:
    outcome = seeded("adapter", "push", peft(), name)
    assert outcome.code == 3
    assert len(outcome.err) < 500
    assert outcome.err.isascii() or "…" in outcome.err


@pytest.mark.parametrize("pair", ["novalue", "=x"])
def test_bad_metadata(seeded: Cli, peft: Peft, pair: str) -> None:
    assert seeded("adapter", "push", peft(), "acme/support", "--meta", pair).code == 3
    twice = ("--meta", "a=1", "--meta", "a=2")
    assert seeded("adapter", "push", peft(), "acme/support", *twice).code == 3


def test_the_base_model_must_be_clear(cli: Cli, peft: Peft, base_folder: Path) -> None:
    none = cli("adapter", "push", peft(), "support")
    assert none.code == 4
    assert "manylora base add" in none.err
    cli("base", "add", base_folder)
    cli("base", "add", base_folder, "--name", "other")
    several = cli("adapter", "push", peft(), "support")
    assert several.code == 3
    assert "--base: other, tiny" in several.err
    assert cli("adapter", "push", peft(), "support", "--base", "tiny").code == 0
    assert cli("adapter", "push", peft(), "support", "--base", "unknown").code == 4


def test_empty_listings_leave_stdout_alone(cli: Cli) -> None:
    listed = cli("adapter", "list")
    assert (listed.code, listed.out) == (0, "")
    assert "manylora adapter push" in listed.err
