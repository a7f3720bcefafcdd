"""The registry's records as the JSON that commands print; the keys are documented in docs/cli.md and stay stable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from manylora.cli.output import time_text

if TYPE_CHECKING:
    from manylora.registry.base_model import BaseModel
    from manylora.registry.records import AdapterInfo, AuditEntry, Published, TenantInfo, VerifyResult, Version
    from manylora.tenant import Grant, KeyInfo
    from manylora.tiers.simulation import Outcome

View = dict[str, object]


def version_view(version: Version, aliases: Mapping[str, int]) -> View:
    """One version, with the aliases that point to it."""
    return {
        "version": str(version.ref),
        "number": version.ref.number,
        "digest": version.ref.digest,
        "engine_name": version.ref.engine_name,
        "base_model": version.base_model,
        "lora_rank": version.lora_rank,
        "size_bytes": version.size_bytes,
        "state": str(version.state),
        "aliases": sorted(alias for alias, number in aliases.items() if number == version.ref.number),
        "created_at": time_text(version.created_at),
        "created_by": version.created_by,
        "metadata": dict(version.metadata),
    }


def adapter_view(info: AdapterInfo) -> View:
    """One adapter and where its aliases point."""
    return {
        "name": str(info.name),
        "base_model": info.base_model,
        "versions": info.versions,
        "aliases": dict(info.aliases),
        "canary_weight": info.canary_weight,
        "created_at": time_text(info.created_at),
    }


def published_view(published: Published, aliases: Mapping[str, int]) -> View:
    """The outcome of a push."""
    return {
        **version_view(published.version, aliases),
        "created": published.created,
        "became_live": published.became_live,
        "warnings": list(published.warnings),
    }


def verify_view(result: VerifyResult) -> View:
    """One checked version."""
    return {
        "version": str(result.version.ref),
        "digest": result.version.ref.digest,
        "ok": result.ok,
        "problem": result.problem,
    }


def base_model_view(model: BaseModel) -> View:
    """One base model."""
    return {
        "name": model.name,
        "source": model.source,
        "revision": model.revision,
        "vocab_size": model.vocab_size,
        "modules": len(model.modules),
    }


def tenant_view(tenant: TenantInfo) -> View:
    """One tenant."""
    return {"name": tenant.name, "created_at": time_text(tenant.created_at)}


def key_view(key: KeyInfo) -> View:
    """One API key, without the key."""
    return {
        "key_id": key.key_id,
        "tenant": key.tenant,
        "label": key.label,
        "is_admin": key.is_admin,
        "hint": key.hint,
        "created_at": time_text(key.created_at),
        "revoked_at": time_text(key.revoked_at) if key.revoked_at else None,
    }


def grant_view(grant: Grant) -> View:
    """One grant."""
    return {"grantee": grant.grantee, "owner": grant.owner, "pattern": grant.pattern}


def audit_view(entry: AuditEntry) -> View:
    """One entry of the audit log."""
    return {
        "id": entry.id,
        "at": time_text(entry.at),
        "actor": entry.actor,
        "action": entry.action,
        "subject": entry.subject,
        "detail": dict(entry.detail),
    }


def simulation_view(outcome: Outcome) -> View:
    """What a policy made of a trace."""
    return {
        "policy": outcome.policy,
        "vram_hit_rate": outcome.vram.hit_rate,
        "host_hit_rate": outcome.host.hit_rate,
        "vram_loads": outcome.vram.loads,
        "host_loads": outcome.host.loads,
        "vram_bytes_in": outcome.vram.bytes_in,
        "host_bytes_in": outcome.host.bytes_in,
        "vram_evictions": outcome.vram.evictions,
        "host_evictions": outcome.host.evictions,
        "vram_reloads": outcome.vram.reloads,
        "host_reloads": outcome.host.reloads,
        "wait_mean_s": outcome.mean_s,
        "wait_p50_s": outcome.percentile_s(0.5),
        "wait_p99_s": outcome.percentile_s(0.99),
        "wait_max_s": outcome.percentile_s(1.0),
    }
