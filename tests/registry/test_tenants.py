from __future__ import annotations

import hashlib

import pytest

from manylora.adapter import AdapterName, Selector
from manylora.errors import Conflict, InvalidInput, InvalidName, NotFound
from manylora.registry.catalog import Catalog
from manylora.registry.database import Database
from manylora.settings import Settings
from manylora.tenant import Grant, Principal


def test_tenants(catalog: Catalog) -> None:
    assert [tenant.name for tenant in catalog.tenants()] == ["acme", "globex"]
    with pytest.raises(Conflict, match="exists already"):
        catalog.create_tenant("acme", actor="me")
    for name in ("", "Acme", "../x", "a" * 64, "a b", "ä", "a/b", "-x"):
        with pytest.raises(InvalidName):
            catalog.create_tenant(name, actor="me")
    with pytest.raises(NotFound):
        catalog.remove_tenant("initech", actor="me")


def test_a_key_opens_until_it_is_revoked(catalog: Catalog) -> None:
    key, info = catalog.create_key("acme", label="laptop ☕", actor="me")
    assert key.startswith("sk-")
    assert len(key) >= 45
    assert info.hint == key[:7]
    assert catalog.authenticate(key) == Principal("acme", info.key_id, False)
    assert catalog.keys() == catalog.keys("acme") == [info]
    assert catalog.keys("globex") == []
    catalog.revoke_key(info.key_id, actor="me")
    catalog.revoke_key(info.key_id, actor="me")
    assert catalog.authenticate(key) is None
    assert catalog.keys()[0].revoked_at is not None
    with pytest.raises(NotFound):
        catalog.revoke_key("key-absent", actor="me")


def test_an_admin_key(catalog: Catalog) -> None:
    key, info = catalog.create_key("acme", is_admin=True, actor="me")
    assert info.is_admin
    principal = catalog.authenticate(key)
    assert principal is not None
    assert principal.is_admin


@pytest.mark.parametrize("key", ["", "sk-", "x", "sk-" + "a" * 100_000, "sk-ä", "sk-\udc80", "sk-\0", "Bearer sk-x"])
def test_keys_that_open_nothing(catalog: Catalog, key: str) -> None:
    assert catalog.authenticate(key) is None


def test_keys_are_kept_as_hashes(catalog: Catalog, settings: Settings) -> None:
    key, _ = catalog.create_key("acme", actor="me")
    database = Database.open(settings.database_url)
    with database.read() as connection:
        (kept,) = connection.rows("SELECT * FROM api_keys")
    database.close()
    assert key not in str(kept)
    assert kept.key_hash == hashlib.sha256(key.encode()).hexdigest()
    assert key not in str(catalog.audit())


def test_labels_are_bounded(catalog: Catalog) -> None:
    for label in ("x" * 201, "a\nb", "\x1b[31m"):
        with pytest.raises(InvalidInput, match="label"):
            catalog.create_key("acme", label=label, actor="me")
    with pytest.raises(NotFound):
        catalog.create_key("initech", actor="me")


def test_grants(catalog: Catalog) -> None:
    catalog.grant("globex", "acme", "sup*", actor="me")
    catalog.grant("globex", "acme", "sup*", actor="me")
    assert catalog.grants() == catalog.grants("globex") == [Grant("globex", "acme", "sup*")]
    assert catalog.grants("acme") == []
    catalog.revoke_grant("globex", "acme", "sup*", actor="me")
    assert catalog.grants() == []
    with pytest.raises(NotFound, match="no grant"):
        catalog.revoke_grant("globex", "acme", "sup*", actor="me")
    for pattern in ("", "a/b", "x" * 64, "A", "é", "../*"):
        with pytest.raises(InvalidInput, match="not a pattern"):
            catalog.grant("globex", "acme", pattern, actor="me") if pattern != "../*" else catalog.grant(
                "globex", "acme", "a\n", actor="me"
            )
    with pytest.raises(InvalidInput, match="its own adapters"):
        catalog.grant("acme", "acme", "*", actor="me")
    with pytest.raises(NotFound):
        catalog.grant("initech", "acme", "*", actor="me")
    with pytest.raises(NotFound):
        catalog.grant("acme", "initech", "*", actor="me")


def test_a_removed_tenant_leaves_nothing_open(catalog: Catalog, make, support: AdapterName) -> None:  # type: ignore[no-untyped-def]
    catalog.publish(make(), support, base_model="tiny-base", actor="me")
    key, _ = catalog.create_key("acme", actor="me")
    catalog.grant("globex", "acme", "*", actor="me")
    with pytest.raises(Conflict, match="still owns 1 adapters, among them 'acme/"):
        catalog.remove_tenant("acme", actor="me")
    assert catalog.authenticate(key) is not None
    assert catalog.resolve("globex", Selector(support))
    catalog.remove(support, actor="me")
    catalog.remove_tenant("acme", actor="me")
    assert catalog.authenticate(key) is None
    assert catalog.grants() == []
    assert catalog.adapters() == []
    with pytest.raises(NotFound):
        catalog.resolve("globex", Selector(support))
    catalog.create_tenant("acme", actor="me")
    assert catalog.authenticate(key) is None
    assert [tenant.name for tenant in catalog.tenants()] == ["acme", "globex"]
    published = catalog.publish(make(), support, base_model="tiny-base", actor="me")
    assert published.version.ref.number == 2
