"""Adapters and their versions as rows: looking them up, numbering, retiring. Versions are never changed or deleted."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, Row, bindparam, insert, select, update

from manylora.adapter import CANARY, LIVE, AdapterName, VersionRef
from manylora.errors import Conflict, NotFound
from manylora.registry import aliases, journal
from manylora.registry.database import as_utc, utc_now
from manylora.registry.records import AdapterInfo, Version, VersionState
from manylora.registry.tables import adapters, versions
from manylora.registry.tables import aliases as alias_rows

# Asked for every request that a gateway has not cached, so they are put together once.
_BY_NAME = select(adapters).where(adapters.c.tenant == bindparam("tenant"), adapters.c.name == bindparam("name"))
_VERSIONS = select(versions, adapters.c.tenant, adapters.c.name.label("adapter_name")).join(adapters)
_BY_NUMBER = _VERSIONS.where(versions.c.adapter_id == bindparam("adapter_id"), versions.c.number == bindparam("number"))


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
    row = connection.execute(_BY_NAME, {"tenant": name.tenant, "name": name.name}).one_or_none()
    return None if row is None or row.removed_at is not None else _adapter(row)


def require(connection: Connection, name: AdapterName) -> Adapter:
    """The adapter, or `NotFound`."""
    found = find(connection, name)
    if found is None:
        raise NotFound(f"the adapter '{name}' does not exist", "see `manylora adapter list`")
    return found


def ensure(connection: Connection, name: AdapterName) -> Adapter:
    """The adapter, made if need be. One that was removed comes back and goes on with its numbers."""
    row = connection.execute(_BY_NAME, {"tenant": name.tenant, "name": name.name}).one_or_none()
    if row is None:
        connection.execute(
            insert(adapters).values(
                tenant=name.tenant, name=name.name, next_number=1, canary_weight=0.0, created_at=utc_now()
            )
        )
    elif row.removed_at is not None:
        connection.execute(update(adapters).where(adapters.c.id == row.id).values(removed_at=None))
    return require(connection, name)


def remove(connection: Connection, name: AdapterName, actor: str) -> None:
    """Retire an adapter with all its versions and aliases. Its numbers are never given out again."""
    adapter = require(connection, name)
    for alias in aliases.current(connection, adapter.id):
        aliases.drop(connection, adapter.id, alias, actor)
    connection.execute(update(versions).where(versions.c.adapter_id == adapter.id).values(state=VersionState.RETIRED))
    connection.execute(
        update(adapters).where(adapters.c.id == adapter.id).values(removed_at=utc_now(), canary_weight=0.0)
    )
    journal.record(connection, actor, "adapter.remove", name)


def of_tenant(connection: Connection, tenant: str) -> list[AdapterName]:
    """The names of a tenant's adapters."""
    query = select(adapters.c.name).where(adapters.c.tenant == tenant, adapters.c.removed_at.is_(None))
    return [AdapterName(tenant, row.name) for row in connection.execute(query.order_by(adapters.c.name))]


def infos(connection: Connection, *conditions: ColumnElement[bool]) -> list[AdapterInfo]:
    """All adapters that meet the conditions, by name, in three queries however many they are."""
    chosen = (adapters.c.removed_at.is_(None), *conditions)
    rows = connection.execute(select(adapters).where(*chosen).order_by(adapters.c.tenant, adapters.c.name)).all()
    pointed: dict[int, dict[str, int]] = defaultdict(dict)
    for alias in connection.execute(select(alias_rows).join(adapters).where(*chosen).order_by(alias_rows.c.alias)):
        pointed[alias.adapter_id][alias.alias] = alias.number
    bases: dict[int, dict[int, str]] = defaultdict(dict)
    columns = select(versions.c.adapter_id, versions.c.number, versions.c.base_model)
    ready = versions.c.state == VersionState.READY
    for version in connection.execute(columns.join(adapters).where(ready, *chosen).order_by(versions.c.number)):
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
        created_at=as_utc(adapter.created_at),
    )


def _adapter(row: Row[tuple[object, ...]]) -> Adapter:
    return Adapter(row.id, AdapterName(row.tenant, row.name), row.next_number, row.canary_weight, row.created_at)


# --- versions -------------------------------------------------------------------------------------------------------


def add_version(connection: Connection, adapter: Adapter, values: dict[str, object]) -> int:
    """A new ready version under the adapter's next number, which is returned."""
    number = adapter.next_number
    connection.execute(update(adapters).where(adapters.c.id == adapter.id).values(next_number=number + 1))
    connection.execute(
        insert(versions).values(adapter_id=adapter.id, number=number, state=VersionState.READY, **values)
    )
    return number


def every_version(connection: Connection, *conditions: ColumnElement[bool]) -> list[Version]:
    """The versions that meet the conditions, by adapter and number."""
    query = _VERSIONS.where(*conditions).order_by(adapters.c.tenant, adapters.c.name, versions.c.number)
    return [_version(row) for row in connection.execute(query)]


def find_version(connection: Connection, adapter: Adapter, number: int) -> Version | None:
    """Version `number` of the adapter, retired or not."""
    row = connection.execute(_BY_NUMBER, {"adapter_id": adapter.id, "number": number}).one_or_none()
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
    found = every_version(
        connection,
        versions.c.adapter_id == adapter.id,
        versions.c.digest == digest,
        versions.c.state == VersionState.READY,
    )
    return found[0] if found else None


def ready_numbers(connection: Connection, adapter: Adapter) -> set[int]:
    """The numbers of the adapter's versions that may be served."""
    query = select(versions.c.number).where(versions.c.adapter_id == adapter.id, versions.c.state == VersionState.READY)
    return {row.number for row in connection.execute(query)}


def retire_version(connection: Connection, name: AdapterName, number: int, actor: str) -> None:
    """End the serving of one version; `Conflict` while an alias points at it."""
    adapter = require(connection, name)
    version = require_version(connection, adapter, number)
    holding = [alias for alias, pointed in aliases.current(connection, adapter.id).items() if pointed == number]
    if holding:
        raise Conflict(f"{version.ref} is pointed at by {', '.join(holding)}", "point the alias elsewhere first")
    if version.state is VersionState.READY:
        connection.execute(
            update(versions)
            .where(versions.c.adapter_id == adapter.id, versions.c.number == number)
            .values(state=VersionState.RETIRED)
        )
        journal.record(connection, actor, "version.retire", version.ref)


def _version(row: Row[tuple[object, ...]]) -> Version:
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
