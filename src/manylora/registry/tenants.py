"""Tenants, their API keys, and the grants between them. A key is kept as its SHA-256 only and shown once, when made."""

from __future__ import annotations

import hashlib
import re
import secrets

from sqlalchemy import Connection, Row, bindparam, delete, insert, or_, select, update

from manylora.adapter import check_segment, shown
from manylora.errors import Conflict, InvalidInput, NotFound
from manylora.registry import journal
from manylora.registry.database import as_utc, utc_now
from manylora.registry.records import TenantInfo
from manylora.registry.tables import api_keys, grants, tenants
from manylora.tenant import KEY_PREFIX, Grant, KeyInfo, Principal

_KEY_BYTES = 32
_KEY_MAX_CHARS = 256
_HINT_CHARS = 7
_LABEL_MAX_CHARS = 200
_PATTERN = re.compile(r"[a-z0-9._*?\[\]!-]{1,63}")
# Asked for every request that a gateway has not cached, so they are put together once.
_BY_HASH = select(api_keys.c.tenant, api_keys.c.key_id, api_keys.c.is_admin).where(
    api_keys.c.key_hash == bindparam("key_hash"), api_keys.c.revoked_at.is_(None)
)
_GRANTS = select(grants).order_by(grants.c.grantee, grants.c.owner, grants.c.pattern)
_GRANTS_OF = _GRANTS.where(grants.c.grantee == bindparam("grantee"))


def create(connection: Connection, name: str, actor: str) -> None:
    """Add a tenant; one that was removed comes back, without its old keys, grants and adapters."""
    check_segment(name, "tenant")
    known = connection.execute(select(tenants).where(tenants.c.name == name)).one_or_none()
    if known is None:
        connection.execute(insert(tenants).values(name=name, created_at=utc_now()))
    elif known.removed_at is None:
        raise Conflict(f"the tenant '{name}' exists already", "choose another name, or go on with this one")
    else:
        connection.execute(update(tenants).where(tenants.c.name == name).values(removed_at=None))
    journal.record(connection, actor, "tenant.create", name)


def every(connection: Connection) -> list[TenantInfo]:
    """All tenants that were not removed, by name."""
    rows = connection.execute(select(tenants).where(tenants.c.removed_at.is_(None)).order_by(tenants.c.name))
    return [TenantInfo(row.name, as_utc(row.created_at)) for row in rows]


def require(connection: Connection, name: str) -> None:
    """`NotFound` unless the tenant exists."""
    check_segment(name, "tenant")
    query = select(tenants.c.name).where(tenants.c.name == name, tenants.c.removed_at.is_(None))
    if connection.execute(query).first() is None:
        raise NotFound(f"the tenant '{name}' does not exist", f"create it: manylora tenant create {name}")


def remove(connection: Connection, name: str, actor: str) -> None:
    """Close a tenant: its keys are revoked and its grants, given and received, end. (Its adapters: see `adapters`.)"""
    require(connection, name)
    now = utc_now()
    connection.execute(update(tenants).where(tenants.c.name == name).values(removed_at=now))
    connection.execute(
        update(api_keys).where(api_keys.c.tenant == name, api_keys.c.revoked_at.is_(None)).values(revoked_at=now)
    )
    connection.execute(delete(grants).where(or_(grants.c.grantee == name, grants.c.owner == name)))
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
    connection.execute(
        insert(api_keys).values(
            key_id=key_id,
            key_hash=_key_hash(key),
            tenant=tenant,
            label=label,
            is_admin=is_admin,
            hint=key[:_HINT_CHARS],
            created_at=now,
        )
    )
    journal.record(connection, actor, "key.create", key_id, tenant=tenant, is_admin=is_admin)
    return key, KeyInfo(key_id, tenant, label, is_admin, as_utc(now), None, key[:_HINT_CHARS])


def keys(connection: Connection, tenant: str | None) -> list[KeyInfo]:
    """All keys, revoked ones too, in the order of their making."""
    query = select(api_keys).order_by(api_keys.c.created_at, api_keys.c.key_id)
    return [_key_info(row) for row in connection.execute(query if tenant is None else query.filter_by(tenant=tenant))]


def revoke_key(connection: Connection, key_id: str, actor: str) -> None:
    """End a key; ending it twice is no error."""
    row = connection.execute(select(api_keys).where(api_keys.c.key_id == key_id)).one_or_none()
    if row is None:
        raise NotFound(f"the key '{shown(key_id)}' does not exist", "see `manylora key list`")
    if row.revoked_at is None:
        connection.execute(update(api_keys).where(api_keys.c.key_id == key_id).values(revoked_at=utc_now()))
        journal.record(connection, actor, "key.revoke", key_id, tenant=row.tenant)


def authenticate(connection: Connection, key: str) -> Principal | None:
    """Whose key this is, or None where it is unknown or revoked."""
    if not key.startswith(KEY_PREFIX) or len(key) > _KEY_MAX_CHARS or not key.isascii():
        return None
    row = connection.execute(_BY_HASH, {"key_hash": _key_hash(key)}).one_or_none()
    return None if row is None else Principal(row.tenant, row.key_id, row.is_admin)


def _key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _key_info(row: Row[tuple[object, ...]]) -> KeyInfo:
    revoked_at = None if row.revoked_at is None else as_utc(row.revoked_at)
    return KeyInfo(row.key_id, row.tenant, row.label, row.is_admin, as_utc(row.created_at), revoked_at, row.hint)


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
        connection.execute(insert(grants).values(grantee=given.grantee, owner=given.owner, pattern=given.pattern))
        journal.record(connection, actor, "grant.add", given.grantee, owner=given.owner, pattern=given.pattern)


def revoke_grant(connection: Connection, given: Grant, actor: str) -> None:
    """Take a grant back, or `NotFound`."""
    done = connection.execute(
        delete(grants).where(
            grants.c.grantee == given.grantee, grants.c.owner == given.owner, grants.c.pattern == given.pattern
        )
    )
    if not done.rowcount:
        raise NotFound(
            f"'{shown(given.grantee)}' has no grant for '{shown(given.owner)}/{shown(given.pattern)}'",
            "see `manylora grant list`",
        )
    journal.record(connection, actor, "grant.revoke", given.grantee, owner=given.owner, pattern=given.pattern)


def grants_of(connection: Connection, tenant: str | None) -> list[Grant]:
    """The grants that `tenant` received (None: of everyone), in order."""
    every_grant = tenant is None
    rows = connection.execute(_GRANTS if every_grant else _GRANTS_OF, {} if every_grant else {"grantee": tenant})
    return [Grant(row.grantee, row.owner, row.pattern) for row in rows]
