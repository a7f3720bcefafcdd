"""Which version answers a request: the door between a tenant and the adapters.

A tenant may call its own adapters, and others' by grant. Whatever is absent, retired or not granted gets the same
answer.
"""

from __future__ import annotations

import hashlib
import secrets

from manylora.adapter import CANARY, LIVE, AdapterName, Selector
from manylora.errors import NotFound
from manylora.registry import adapters, aliases, tenants
from manylora.registry.connection import Connection
from manylora.registry.records import AdapterInfo, Version, VersionState

_FRACTION_BITS = 53


def resolve(connection: Connection, tenant: str, selector: Selector, sticky: str) -> Version:
    """The version that `tenant` gets for `selector`, or `NotFound`."""
    adapter = adapters.find(connection, selector.adapter)
    if adapter is None or not _may_call(connection, tenant, selector.adapter):
        raise absent(selector)
    number = selector.number
    if number is None:
        number = _pointed(adapter, aliases.current(connection, adapter.id), selector.alias, sticky)
    version = None if number is None else adapters.find_version(connection, adapter, number)
    if version is None or version.state is not VersionState.READY:
        raise absent(selector)
    return version


def absent(selector: Selector) -> NotFound:
    """The one answer for what is absent, retired or forbidden."""
    return NotFound(f"The model `{selector}` does not exist or you do not have access to it.")


def visible(connection: Connection, tenant: str) -> list[AdapterInfo]:
    """The adapters that `tenant` may call and that have something to answer with."""
    granted = tenants.grants_of(connection, tenant)
    found = adapters.infos(
        connection,
        "AND (a.tenant = :tenant OR a.tenant IN (SELECT owner FROM grants WHERE grantee = :tenant))",
        tenant=tenant,
    )
    return [
        info
        for info in found
        if info.aliases and (info.name.tenant == tenant or any(grant.covers(tenant, info.name) for grant in granted))
    ]


def takes_canary(sticky: str, adapter: AdapterName, number: int, weight: float) -> bool:
    """Whether a caller belongs to the canary's share: always the same for one `sticky`, by chance without."""
    if not sticky:
        return secrets.randbits(_FRACTION_BITS) < weight * (1 << _FRACTION_BITS)
    found = hashlib.sha256(f"{adapter}@v{number}\n{sticky}".encode(errors="replace")).digest()
    return int.from_bytes(found[:8], "big") >> (64 - _FRACTION_BITS) < weight * (1 << _FRACTION_BITS)


def _may_call(connection: Connection, tenant: str, name: AdapterName) -> bool:
    if tenant == name.tenant:
        return True
    return any(grant.covers(tenant, name) for grant in tenants.grants_of(connection, tenant))


def _pointed(adapter: adapters.Adapter, pointed: dict[str, int], alias: str | None, sticky: str) -> int | None:
    if alias is not None:
        return pointed.get(alias)
    canary = pointed.get(CANARY)
    if canary is not None and takes_canary(sticky, adapter.name, canary, adapter.canary_weight):
        return canary
    return pointed.get(LIVE)
