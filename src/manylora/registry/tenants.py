"""Tenants, their API keys, and the grants between them. A key is kept as its SHA-256 only and shown once, when made."""

from __future__ import annotations

import hashlib
import re
import secrets

from manylora.adapter import check_segment, shown
from manylora.errors import Conflict, InvalidInput, NotFound
from manylora.registry import journal
from manylora.registry.connection import Connection, Row, as_utc, utc_now
from manylora.registry.records import TenantInfo
from manylora.tenant import KEY_PREFIX, Grant, KeyInfo, Principal

_KEY_BYTES = 32
_KEY_MAX_CHARS = 256
_HINT_CHARS = 7
_LABEL_MAX_CHARS = 200
_PATTERN = re.compile(r"[a-z0-9._*?\[\]!-]{1,63}")


def create(connection: Connection, name: str, actor: str) -> None:
    """Add a tenant; one that was removed comes back, without its old keys, grants and adapters."""
    check_segment(name, "tenant")
    known = connection.row("SELECT removed_at FROM tenants WHERE name = :name", name=name)
    if known is None:
        connection.change("INSERT INTO tenants (name, created_at) VALUES (:name, :now)", name=name, now=utc_now())
    elif known.removed_at is None:
        raise Conflict(f"the tenant '{name}' exists already", "choose another name, or go on with this one")
    else:
        connection.change("UPDATE tenants SET removed_at = NULL WHERE name = :name", name=name)
    journal.record(connection, actor, "tenant.create", name)


def every(connection: Connection) -> list[TenantInfo]:
    """All tenants that were not removed, by name."""
    rows = connection.rows("SELECT name, created_at FROM tenants WHERE removed_at IS NULL ORDER BY name")
    return [TenantInfo(row.name, as_utc(row.created_at)) for row in rows]


def require(connection: Connection, name: str) -> None:
    """`NotFound` unless the tenant exists."""
    check_segment(name, "tenant")
    if connection.row("SELECT name FROM tenants WHERE name = :name AND removed_at IS NULL", name=name) is None:
        raise NotFound(f"the tenant '{name}' does not exist", f"create it: manylora tenant create {name}")


def remove(connection: Connection, name: str, actor: str) -> None:
    """Close a tenant: its keys are revoked and its grants, given and received, end. (Its adapters: see `adapters`.)"""
    require(connection, name)
    now = utc_now()
    connection.change("UPDATE tenants SET removed_at = :now WHERE name = :name", now=now, name=name)
    connection.change(
        "UPDATE api_keys SET revoked_at = :now WHERE tenant = :name AND revoked_at IS NULL", now=now, name=name
    )
    connection.change("DELETE FROM grants WHERE grantee = :name OR owner = :name", name=name)
    journal.record(connection, actor, "tenant.remove", name)


# --- keys -----------------------------------------------------------------------------------------------------------


def create_key(connection: Connection, tenant: str, label: str, is_admin: bool, actor: str) -> tuple[str, KeyInfo]:
    """A new key, which is returned here and never again, and what is kept of it."""
    require(connection, tenant)
    if len(label) > _LABEL_MAX_CHARS or not (label.isprintable() or not label):
        raise InvalidInput("the key's label is too long or not printable", f"use at most {_LABEL_MAX_CHARS} characters")
    key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    key_id = f"key-{secrets.token_hex(8)}"
    now = utc_now()
    connection.change(
        "INSERT INTO api_keys (key_id, key_hash, tenant, label, is_admin, hint, created_at)"
        " VALUES (:key_id, :key_hash, :tenant, :label, :is_admin, :hint, :created_at)",
        key_id=key_id,
        key_hash=_key_hash(key),
        tenant=tenant,
        label=label,
        is_admin=is_admin,
        hint=key[:_HINT_CHARS],
        created_at=now,
    )
    journal.record(connection, actor, "key.create", key_id, tenant=tenant, is_admin=is_admin)
    return key, KeyInfo(key_id, tenant, label, is_admin, as_utc(now), None, key[:_HINT_CHARS])


def keys(connection: Connection, tenant: str | None) -> list[KeyInfo]:
    """All keys, revoked ones too, in the order of their making."""
    if tenant is None:
        rows = connection.rows("SELECT * FROM api_keys ORDER BY created_at, key_id")
    else:
        rows = connection.rows(
            "SELECT * FROM api_keys WHERE tenant = :tenant ORDER BY created_at, key_id", tenant=tenant
        )
    return [_key_info(row) for row in rows]


def revoke_key(connection: Connection, key_id: str, actor: str) -> None:
    """End a key; ending it twice is no error."""
    row = connection.row("SELECT tenant, revoked_at FROM api_keys WHERE key_id = :key_id", key_id=key_id)
    if row is None:
        raise NotFound(f"the key '{shown(key_id)}' does not exist", "see `manylora key list`")
    if row.revoked_at is None:
        connection.change("UPDATE api_keys SET revoked_at = :now WHERE key_id = :key_id", now=utc_now(), key_id=key_id)
        journal.record(connection, actor, "key.revoke", key_id, tenant=row.tenant)


def authenticate(connection: Connection, key: str) -> Principal | None:
    """Whose key this is, or None where it is unknown or revoked."""
    if not key.startswith(KEY_PREFIX) or len(key) > _KEY_MAX_CHARS or not key.isascii():
        return None
    row = connection.row(
        "SELECT tenant, key_id, is_admin FROM api_keys WHERE key_hash = :key_hash AND revoked_at IS NULL",
        key_hash=_key_hash(key),
    )
    return None if row is None else Principal(row.tenant, row.key_id, bool(row.is_admin))


def _key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _key_info(row: Row) -> KeyInfo:
    revoked_at = None if row.revoked_at is None else as_utc(row.revoked_at)
    return KeyInfo(row.key_id, row.tenant, row.label, bool(row.is_admin), as_utc(row.created_at), revoked_at, row.hint)


# --- grants ---------------------------------------------------------------------------------------------------------


def grant(connection: Connection, given: Grant, actor: str) -> None:
    """Let a tenant call adapters of another; granting twice is no error."""
    require(connection, given.grantee)
    require(connection, given.owner)
    if not _PATTERN.fullmatch(given.pattern):
        raise InvalidInput(
            f"'{shown(given.pattern)}' is not a pattern of adapter names", "write a name, or use * and ? as wildcards"
        )
    if given.grantee == given.owner:
        raise InvalidInput("a tenant needs no grant for its own adapters", "name two different tenants")
    if given not in grants_of(connection, given.grantee):
        connection.change(
            "INSERT INTO grants (grantee, owner, pattern) VALUES (:grantee, :owner, :pattern)",
            grantee=given.grantee,
            owner=given.owner,
            pattern=given.pattern,
        )
        journal.record(connection, actor, "grant.add", given.grantee, owner=given.owner, pattern=given.pattern)


def revoke_grant(connection: Connection, given: Grant, actor: str) -> None:
    """Take a grant back, or `NotFound`."""
    done = connection.change(
        "DELETE FROM grants WHERE grantee = :grantee AND owner = :owner AND pattern = :pattern",
        grantee=given.grantee,
        owner=given.owner,
        pattern=given.pattern,
    )
    if not done:
        raise NotFound(
            f"'{shown(given.grantee)}' has no grant for '{shown(given.owner)}/{shown(given.pattern)}'",
            "see `manylora grant list`",
        )
    journal.record(connection, actor, "grant.revoke", given.grantee, owner=given.owner, pattern=given.pattern)


def grants_of(connection: Connection, tenant: str | None) -> list[Grant]:
    """The grants that `tenant` received (None: of everyone), in order."""
    if tenant is None:
        rows = connection.rows("SELECT * FROM grants ORDER BY grantee, owner, pattern")
    else:
        rows = connection.rows("SELECT * FROM grants WHERE grantee = :tenant ORDER BY owner, pattern", tenant=tenant)
    return [Grant(row.grantee, row.owner, row.pattern) for row in rows]
