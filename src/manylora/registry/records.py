"""What the registry answers with: plain frozen records, no database row ever leaves the registry. Times are UTC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from manylora.adapter import AdapterName, VersionRef


class VersionState(StrEnum):
    """A version is served while `ready`; `retired` ones stay on record and are never served again."""

    READY = "ready"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class Version:
    """One immutable version of an adapter."""

    ref: VersionRef
    base_model: str
    lora_rank: int
    size_bytes: int
    created_at: datetime
    created_by: str
    state: VersionState
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return self.ref.digest


@dataclass(frozen=True, slots=True)
class Published:
    """The outcome of a push. `created` is false when this adapter already had a version with the same content."""

    version: Version
    created: bool
    became_live: bool
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter and where its aliases point. `base_model` is that of the live version, else of the newest."""

    name: AdapterName
    aliases: Mapping[str, int]
    canary_weight: float
    versions: int
    base_model: str
    created_at: datetime

    @property
    def live(self) -> int | None:
        return self.aliases.get("live")


@dataclass(frozen=True, slots=True)
class AliasChange:
    """One entry of an alias' history. `number` is None where the alias was removed."""

    alias: str
    number: int | None
    previous: int | None
    action: str
    """`set`, `rollback` or `removed`."""
    at: datetime
    actor: str


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Whether a version's stored bytes still have its digest; `problem` says what is wrong where they don't."""

    version: Version
    ok: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """A tenant as the registry knows it."""

    name: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who did what to what, when. `detail` holds small facts only, never key material or prompt text."""

    id: int
    at: datetime
    actor: str
    action: str
    subject: str
    detail: Mapping[str, object]
