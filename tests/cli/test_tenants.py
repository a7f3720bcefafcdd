"""`manylora base|tenant|key|grant|audit` against a real registry in a temporary home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Cli = Callable[..., Any]


def test_base_models(cli: Cli, base_folder: Path, tmp_path: Path) -> None:
    assert cli("base", "list").out == ""
    assert cli("base", "add", base_folder, "--json").json["name"] == "tiny"
    assert cli("base", "add", base_folder, "--name", "smol").code == 0
    listed = cli("base", "list", "--json").json["base_models"]
    assert {model["name"] for model in listed} == {"tiny", "smol"}
    assert {model["source"] for model in listed} == {str(base_folder)}
    assert "SOURCE" in cli("base", "list").out
    assert cli("base", "add", tmp_path / "none").code in (3, 4)


def test_tenants(cli: Cli) -> None:
    assert cli("tenant", "create", "acme").code == 0
    assert cli("tenant", "create", "acme").code == 5
    assert cli("tenant", "create", "Acme").code == 3
    assert [tenant["name"] for tenant in cli("tenant", "list", "--json").json["tenants"]] == ["acme"]
    assert "acme" in cli("tenant", "list").out
    assert cli("tenant", "remove", "acme").code == 0
    assert cli("tenant", "remove", "acme").code == 4


def test_keys(seeded: Cli) -> None:
    plain = seeded("key", "create", "acme")
    key = plain.out.strip()
    assert key.startswith("sk-")
    assert "not shown again" in plain.err
    made = seeded("key", "create", "acme", "--label", "ops", "--admin", "--json").json
    assert (made["tenant"], made["label"], made["is_admin"], made["revoked_at"]) == ("acme", "ops", True, None)
    listed = seeded("key", "list", "--tenant", "acme", "--json")
    assert len(listed.json["keys"]) == 2
    assert key not in listed.out
    assert made["key"] not in seeded("key", "list").out
    assert seeded("key", "revoke", made["key_id"]).code == 0
    assert seeded("key", "revoke", "key-none").code == 4
    revoked = {k["key_id"]: k["revoked_at"] for k in seeded("key", "list", "--json").json["keys"]}
    assert revoked[made["key_id"]] is not None
    assert seeded("key", "create", "nobody").code == 4


def test_a_key_needs_no_tenant_named(cli: Cli) -> None:
    assert cli("key", "create", "--json").json["tenant"] == "default"


def test_grants(seeded: Cli) -> None:
    seeded("tenant", "create", "globex")
    assert seeded("grant", "add", "globex", "acme/support-*").out == "globex may call acme/support-*\n"
    listed = seeded("grant", "list", "--tenant", "globex", "--json").json["grants"]
    assert listed == [{"grantee": "globex", "owner": "acme", "pattern": "support-*"}]
    assert "acme/support-*" in seeded("grant", "list").out
    assert seeded("grant", "remove", "globex", "acme/support-*").code == 0
    assert seeded("grant", "remove", "globex", "acme/support-*").code == 4
    assert seeded("grant", "add", "globex", "support").code == 3
    assert seeded("grant", "add", "globex", "acme/").code == 3
    assert seeded("grant", "add", "nobody", "acme/x").code == 4


def test_audit(seeded: Cli) -> None:
    entries = seeded("audit", "--json").json["entries"]
    assert entries[0]["subject"] == "acme"
    assert all(entry["actor"].startswith("cli:") for entry in entries)
    assert len(seeded("audit", "--limit", "1", "--json").json["entries"]) == 1
    assert "acme" in seeded("audit").out
    assert seeded("audit", "--limit", "0").code == 2
