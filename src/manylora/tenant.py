"""Who calls: tenants, API keys and grants, as plain records. How they are stored is the registry's matter."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from datetime import datetime

from manylora.adapter import AdapterName

KEY_PREFIX = "sk-"


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller: the tenant that its key belongs to; `is_admin` opens the management routes."""

    tenant: str
    key_id: str
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """An API key as it may be shown again: never the key itself. Times are UTC."""

    key_id: str
    tenant: str
    label: str
    is_admin: bool
    created_at: datetime
    revoked_at: datetime | None
    hint: str
    """The first characters of the key, enough for a person to tell keys apart."""


@dataclass(frozen=True, slots=True)
class Grant:
    """`grantee` (a tenant) may call the adapters of `owner` whose name matches `pattern` (shell wildcards)."""

    grantee: str
    owner: str
    pattern: str

    def covers(self, tenant: str, adapter: AdapterName) -> bool:
        """Whether `tenant` may call `adapter` by this grant."""
        return (
            self.grantee == tenant and self.owner == adapter.tenant and fnmatch.fnmatchcase(adapter.name, self.pattern)
        )
