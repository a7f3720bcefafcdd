"""Adapters and their versions as rows: looking them up, numbering, retiring. Versions are never changed or deleted."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from manylora.adapter import CANARY, LIVE, AdapterName, VersionRef
from manylora.errors import Conflict, NotFound
from manylora.registry import aliases, journal
from manylora.registry.connection import Connection, Row, as_utc, utc_now
from manylora.registry.records import AdapterInfo, Version, VersionState

_BY_NAME = "SELECT * FROM adapters WHERE tenant = :tenant AND name = :name"
_VERSIONS = "SELECT v.*, a.tenant, a.name AS adapter_name FROM versions v JOIN adapters a ON a.id = v.adapter_id "
_EVERY_ALIAS = "SELECT p.* FROM aliases p JOIN adapters a ON a.id = p.adapter_id"
_EVERY_BASE = "SELECT v.adapter_id, v.number, v.base_model FROM versions v JOIN adapters a ON a.id = v.adapter_id"
_READY, _RETIRED = VersionState.READY.value, VersionState.RETIRED.value
_IN_ORDER = " ORDER BY a.tenant, a.name, v.number"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's own row."""

    id: int
    name: AdapterName
    next_number: int
    canary_weight: float
    created_at: datetime


# --- adapters -------------------------------------------------------------------------------------------------------


def find(connection: Connection, name: AdapterName) -> Adapter | None:
    """The adapter, or None where it is absent or was removed."""
    row = connection.row(_BY_NAME, tenant=name.tenant, name=name.name)
    return None if row is None or row.removed_at is not None else _adapter(row)


def require(connection: Connection, name: AdapterName) -> Adapter:
    """The adapter, or `NotFound`."""
    found = find(connection, name)
    if found is None:
        raise NotFound(f"the adapter '{name}' does not exist", "see `manylora adapter list`")
    return found


def ensure(connection: Connection, name: AdapterName) -> Adapter:
    """The adapter, made if need be. One that was removed comes back and goes on with its numbers."""
    row = connection.row(_BY_NAME, tenant=name.tenant, name=name.name)
    if row is None:
        connection.change(
            "INSERT INTO adapters (tenant, name, next_number, canary_weight, created_at)"
            " VALUES (:tenant, :name, 1, 0.0, :now)",
            tenant=name.tenant,
            name=name.name,
            now=utc_now(),
        )
    elif row.removed_at is not None:
        connection.change("UPDATE adapters SET removed_at = NULL WHERE id = :id", id=row.id)
    return require(connection, name)


def remove(connection: Connection, name: AdapterName, actor: str) -> None:
    """Retire an adapter with all its versions and aliases. Its numbers are never given out again."""
    adapter = require(connection, name)
    for alias in aliases.current(connection, adapter.id):
        aliases.drop(connection, adapter.id, alias, actor)
    connection.change("UPDATE versions SET state = :retired WHERE adapter_id = :id", retired=_RETIRED, id=adapter.id)
    connection.change(
        "UPDATE adapters SET removed_at = :now, canary_weight = 0.0 WHERE id = :id", now=utc_now(), id=adapter.id
    )
    journal.record(connection, actor, "adapter.remove", name)


def of_tenant(connection: Connection, tenant: str) -> list[AdapterName]:
    """The names of a tenant's adapters."""
    rows = connection.rows(
        "SELECT name FROM adapters WHERE tenant = :tenant AND removed_at IS NULL ORDER BY name", tenant=tenant
    )
    return [AdapterName(tenant, row.name) for row in rows]


def infos(connection: Connection, condition: str = "", **values: object) -> list[AdapterInfo]:
    """All adapters (or those whose row `a` meets a condition), by name, in three queries however many they are."""
    chosen = "WHERE a.removed_at IS NULL " + condition
    rows = connection.rows(" ".join(("SELECT * FROM adapters a", chosen, "ORDER BY a.tenant, a.name")), **values)
    pointed: dict[int, dict[str, int]] = defaultdict(dict)
    for alias in connection.rows(" ".join((_EVERY_ALIAS, chosen, "ORDER BY p.alias")), **values):
        pointed[alias.adapter_id][alias.alias] = alias.number
    bases: dict[int, dict[int, str]] = defaultdict(dict)
    ready = "AND v.state = :ready ORDER BY v.number"
    for version in connection.rows(" ".join((_EVERY_BASE, chosen, ready)), ready=_READY, **values):
        bases[version.adapter_id][version.number] = version.base_model
    return [_info(_adapter(row), pointed[row.id], bases[row.id]) for row in rows]


def _info(adapter: Adapter, pointed: dict[str, int], bases: dict[int, str]) -> AdapterInfo:
    shown_number = pointed.get(LIVE, max(bases, default=0))
    return AdapterInfo(
        name=adapter.name,
        aliases=pointed,
        canary_weight=adapter.canary_weight if CANARY in pointed else 0.0,
        versions=len(bases),
        base_model=bases.get(shown_number, ""),
        created_at=adapter.created_at,
    )


def _adapter(row: Row) -> Adapter:
    return Adapter(
        row.id, AdapterName(row.tenant, row.name), row.next_number, row.canary_weight, as_utc(row.created_at)
    )


# --- versions -------------------------------------------------------------------------------------------------------


def add_version(connection: Connection, adapter: Adapter, values: dict[str, object]) -> int:
    """A new ready version under the adapter's next number, which is returned."""
    number = adapter.next_number
    connection.change("UPDATE adapters SET next_number = :next WHERE id = :id", next=number + 1, id=adapter.id)
    connection.change(
        "INSERT INTO versions (adapter_id, number, digest, base_model, lora_rank, size_bytes, state, metadata,"
        " created_at, created_by) VALUES (:adapter_id, :number, :digest, :base_model, :lora_rank, :size_bytes, :state,"
        " :metadata, :created_at, :created_by)",
        adapter_id=adapter.id,
        number=number,
        state=_READY,
        **values,
    )
    return number


def every_version(connection: Connection) -> list[Version]:
    """All versions of all adapters, by adapter and number."""
    return [_version(row) for row in connection.rows(_VERSIONS + _IN_ORDER)]


def versions_of(connection: Connection, name: AdapterName) -> list[Version]:
    """All versions of an adapter, retired ones too, by number."""
    condition = "WHERE a.tenant = :tenant AND a.name = :name"
    rows = connection.rows(_VERSIONS + condition + _IN_ORDER, tenant=name.tenant, name=name.name)
    return [_version(row) for row in rows]


def find_version(connection: Connection, adapter: Adapter, number: int) -> Version | None:
    """Version `number` of the adapter, retired or not."""
    condition = "WHERE v.adapter_id = :adapter_id AND v.number = :number"
    row = connection.row(_VERSIONS + condition, adapter_id=adapter.id, number=number)
    return None if row is None else _version(row)


def require_version(connection: Connection, adapter: Adapter, number: int, *, ready: bool = False) -> Version:
    """Version `number` of the adapter, or `NotFound`; `Conflict` where it must be ready and is retired."""
    found = find_version(connection, adapter, number)
    if found is None:
        raise NotFound(f"the adapter '{adapter.name}' has no version {number}", "see `manylora adapter show`")
    if ready and found.state is not VersionState.READY:
        raise Conflict(f"{found.ref} is retired", "choose a version that is ready, or push the adapter again")
    return found


def find_content(connection: Connection, adapter: Adapter, digest: str) -> Version | None:
    """The adapter's ready version with this content."""
    condition = "WHERE v.adapter_id = :adapter_id AND v.digest = :digest AND v.state = :ready"
    row = connection.row(_VERSIONS + condition + _IN_ORDER, adapter_id=adapter.id, digest=digest, ready=_READY)
    return None if row is None else _version(row)


def ready_numbers(connection: Connection, adapter: Adapter) -> set[int]:
    """The numbers of the adapter's versions that may be served."""
    rows = connection.rows(
        "SELECT number FROM versions WHERE adapter_id = :id AND state = :ready", id=adapter.id, ready=_READY
    )
    return {row.number for row in rows}


def retire_version(connection: Connection, name: AdapterName, number: int, actor: str) -> None:
    """End the serving of one version; `Conflict` while an alias points at it."""
    adapter = require(connection, name)
    version = require_version(connection, adapter, number)
    holding = [alias for alias, pointed in aliases.current(connection, adapter.id).items() if pointed == number]
    if holding:
        raise Conflict(f"{version.ref} is pointed at by {', '.join(holding)}", "point the alias elsewhere first")
    if version.state is VersionState.READY:
        connection.change(
            "UPDATE versions SET state = :retired WHERE adapter_id = :id AND number = :number",
            retired=_RETIRED,
            id=adapter.id,
            number=number,
        )
        journal.record(connection, actor, "version.retire", version.ref)


def _version(row: Row) -> Version:
    return Version(
        ref=VersionRef(AdapterName(row.tenant, row.adapter_name), row.number, row.digest),
        base_model=row.base_model,
        lora_rank=row.lora_rank,
        size_bytes=row.size_bytes,
        created_at=as_utc(row.created_at),
        created_by=row.created_by,
        state=VersionState(row.state),
        metadata=json.loads(row.metadata),
    )
