"""A push, step by step: check the folder, store the bytes, then make them visible in one transaction.

Killed before the transaction commits, a push leaves at most bytes that nothing points at, and the same push succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manylora.adapter import CANARY, ENGINE_DIGEST_CHARS, LIVE, AdapterName
from manylora.errors import Conflict, InvalidAdapter, InvalidInput
from manylora.peft_config import WEIGHTS_FILE
from manylora.registry import adapters, aliases, base_models, journal, tenants
from manylora.registry.base_copies import check_base_copies
from manylora.registry.base_model import BaseModel
from manylora.registry.compatibility import check
from manylora.registry.connection import Connection, utc_now
from manylora.registry.finite import check_finite
from manylora.registry.peft_format import PeftAdapter, digest, read_peft_folder
from manylora.registry.records import Published, Version
from manylora.registry.untrusted_files import stamp

_METADATA_MAX = 64
_KEY_MAX_CHARS = 128
_VALUE_MAX_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Checked:
    """A folder that passed every check, and the identity of its content."""

    adapter: PeftAdapter
    digest: str
    warnings: tuple[str, ...]


def check_folder(folder: Path, base: BaseModel, *, max_bytes: int, force: bool) -> Checked:
    """Run every check on a folder; warnings refuse it too, unless forced."""
    adapter = read_peft_folder(folder, max_bytes=max_bytes)
    warnings = (*check(adapter, base), *check_base_copies(adapter, base))
    if warnings and not force:
        raise InvalidAdapter("; ".join(warnings), "if you are sure that it fits, push it with --force")
    check_finite(adapter.weights, adapter.header, name=WEIGHTS_FILE)
    found = digest(adapter.config_bytes, adapter.weights)
    if stamp(adapter.weights) != adapter.weights_stamp:
        raise InvalidAdapter(f"{WEIGHTS_FILE} changed while it was read", "push it again once it is written")
    return Checked(adapter, found, warnings)


def check_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata as it will be kept, or `InvalidInput` where it is more than a few short texts."""
    kept = dict(metadata)
    sound = all(
        isinstance(key, str)
        and isinstance(value, str)
        and 0 < len(key) <= _KEY_MAX_CHARS
        and len(value) <= _VALUE_MAX_CHARS
        for key, value in kept.items()
    )
    if not sound or len(kept) > _METADATA_MAX:
        raise InvalidInput(
            "the metadata is too large or not text",
            f"give at most {_METADATA_MAX} texts of at most {_VALUE_MAX_CHARS} characters",
        )
    return kept


def refuse_prefix_collision(connection: Connection, digest: str) -> None:
    """Engine names carry the digest's start, so two contents may not share it (by chance: once in 2^64)."""
    prefix = digest[:ENGINE_DIGEST_CHARS]
    known = connection.row("SELECT digest FROM blobs WHERE digest_prefix = :prefix", prefix=prefix)
    if known is not None and known.digest != digest:
        raise Conflict(
            f"another adapter's digest starts with {prefix} too",
            "save the adapter with any small change, such as another adapter_config.json entry",
        )


def make_visible(
    connection: Connection,
    name: AdapterName,
    checked: Checked,
    *,
    base_model: str,
    actor: str,
    promote: bool | None,
    metadata: Mapping[str, str],
) -> Published:
    """The rows of a push whose bytes are stored: a new version, or the one that has this content already."""
    tenants.require(connection, name.tenant)
    base_models.refuse_name(connection, name)
    refuse_prefix_collision(connection, checked.digest)
    adapter = adapters.ensure(connection, name)
    known = adapters.find_content(connection, adapter, checked.digest)
    if known is not None and known.base_model != base_model:
        raise Conflict(f"{known.ref} has this content, for the base model '{known.base_model}'", "use another name")
    version = known or _insert(connection, adapter, checked, base_model, actor, metadata)
    live = aliases.current(connection, adapter.id).get(LIVE)
    wanted = promote if promote is not None else known is None and live is None
    became_live = wanted and make_live(connection, adapter, version, actor)
    return Published(version, known is None, became_live, checked.warnings)


def make_live(connection: Connection, adapter: adapters.Adapter, version: Version, actor: str) -> bool:
    """Point `live` at a version; a canary of the same version has done its duty and ends. False if it was live."""
    if not aliases.point(connection, adapter.id, LIVE, version.ref.number, actor):
        return False
    if aliases.current(connection, adapter.id).get(CANARY) == version.ref.number:
        aliases.set_canary(connection, adapter.id, None, 0.0, actor)
    journal.record(connection, actor, "version.promote", version.ref)
    return True


def _insert(
    connection: Connection,
    adapter: adapters.Adapter,
    checked: Checked,
    base_model: str,
    actor: str,
    metadata: Mapping[str, str],
) -> Version:
    now = utc_now()
    if connection.row("SELECT digest FROM blobs WHERE digest = :digest", digest=checked.digest) is None:
        connection.change(
            "INSERT INTO blobs (digest, digest_prefix, config_bytes, weights_bytes, created_at)"
            " VALUES (:digest, :digest_prefix, :config_bytes, :weights_bytes, :created_at)",
            digest=checked.digest,
            digest_prefix=checked.digest[:ENGINE_DIGEST_CHARS],
            config_bytes=len(checked.adapter.config_bytes),
            weights_bytes=checked.adapter.header.file_bytes,
            created_at=now,
        )
    values: dict[str, object] = {
        "digest": checked.digest,
        "base_model": base_model,
        "lora_rank": checked.adapter.lora_rank,
        "size_bytes": checked.adapter.size_bytes,
        "metadata": json.dumps(dict(metadata), sort_keys=True),
        "created_at": now,
        "created_by": journal.actor_name(actor),
    }
    version = adapters.require_version(connection, adapter, adapters.add_version(connection, adapter, values))
    journal.record(
        connection, actor, "version.publish", version.ref, digest=checked.digest, warnings=list(checked.warnings)
    )
    return version
