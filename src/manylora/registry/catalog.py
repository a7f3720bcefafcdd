"""The catalog: the registry's one door, for the command line, the gateway and the node's agent.

Synchronous and thread-safe; callers in async code use threads. Every change is one transaction that also writes the
audit log and raises `change_seq`. What the calls do to the tables is in the module named for each noun; this one
only opens the stores and sets the boundaries of transactions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from manylora.adapter import CANARY, LIVE, AdapterName, Selector, check_alias, check_digest, check_segment
from manylora.errors import Conflict, CorruptBlob, InvalidInput, ManyloraError, NotFound
from manylora.registry import adapters, admission, aliases, base_models, journal, publishing, tenants
from manylora.registry.base_model import BaseModel
from manylora.registry.blobs import BlobStore
from manylora.registry.database import Database
from manylora.registry.records import (
    AdapterInfo,
    AliasChange,
    AuditEntry,
    Published,
    TenantInfo,
    VerifyResult,
    Version,
)
from manylora.settings import Settings
from manylora.tenant import Grant, KeyInfo, Principal

Progress = Callable[[int, int], None]


class Catalog:
    """The registry, open. Use it as a context manager, or call `close`."""

    def __init__(self, database: Database, blobs: BlobStore, max_adapter_bytes: int) -> None:
        self._database = database
        self._blobs = blobs
        self._max_adapter_bytes = max_adapter_bytes

    @classmethod
    def open(cls, settings: Settings) -> Catalog:
        """Open the registry, creating or migrating its database as needed; several processes may do so at once."""
        blobs = BlobStore.open(settings.blob_url)
        return cls(Database.open(settings.database_url), blobs, settings.max_adapter_bytes)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def change_seq(self) -> int:
        """A number that grows with every committed change of any process. Cheap enough to ask on every request."""
        return self._database.change_seq()

    # --- base models --------------------------------------------------------------------------------------------------

    def register_base_model(self, model: BaseModel, *, actor: str) -> None:
        """Make a base model known. Nothing changes where it is known just so."""
        if model in self.base_models():
            return
        with self._database.write() as connection:
            base_models.register(connection, model, actor)

    def base_model(self, name: str) -> BaseModel:
        with self._database.read() as connection:
            return base_models.find(connection, name)

    def base_models(self) -> list[BaseModel]:
        with self._database.read() as connection:
            return base_models.every(connection)

    # --- publishing ---------------------------------------------------------------------------------------------------

    def publish(
        self,
        folder: Path,
        name: AdapterName,
        *,
        base_model: str,
        actor: str,
        force: bool = False,
        promote: bool | None = None,
        metadata: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> Published:
        """Push a PEFT folder as a version of `name`. When this returns, the version is durable and may be called.

        The first version becomes live by itself, later ones with `promote`; `promote=False` leaves `live` alone in any
        case. Content that the adapter has already gives that version back; content that only another adapter has gets a
        new version over the same bytes. `force` accepts warnings. `progress` hears bytes done and bytes in all.
        """
        kept = publishing.check_metadata(metadata or {})
        with self._database.read() as connection:
            tenants.require(connection, name.tenant)
            base = base_models.find(connection, base_model)
            base_models.refuse_name(connection, name)
        checked = publishing.check_folder(folder, base, max_bytes=self._max_adapter_bytes, force=force)
        with self._database.read() as connection:
            publishing.refuse_prefix_collision(connection, checked.digest)
        self._blobs.put(checked.digest, checked.adapter.config_bytes, checked.adapter.weights, progress)
        with self._database.write() as connection:
            return publishing.make_visible(
                connection, name, checked, base_model=base.name, actor=actor, promote=promote, metadata=kept
            )

    def download(self, digest: str, into: Path) -> None:
        """Write a content's two files into an existing empty folder; `CorruptBlob` where they lack the digest."""
        self._blobs.get_to(check_digest(digest), into)

    def blob_files(self, digest: str) -> dict[str, int]:
        """A content's stored files and their sizes; empty where there are none."""
        return self._blobs.files(check_digest(digest))

    def verify(self, name: AdapterName | None = None) -> Iterator[VerifyResult]:
        """Read and hash the bytes of every version (of one adapter, or all), and go on whatever is found."""
        with self._database.read() as connection:
            if name is not None:
                adapters.require(connection, name)
            found = adapters.versions_of(connection, name) if name else adapters.every_version(connection)
        problems: dict[str, str] = {}
        for version in found:
            if version.digest not in problems:
                problems[version.digest] = self._problem(version.digest)
            yield VerifyResult(version, not problems[version.digest], problems[version.digest])

    def _problem(self, digest: str) -> str:
        try:
            self._blobs.verify(digest)
        except (CorruptBlob, ManyloraError) as error:
            return str(error)
        return ""

    # --- adapters and versions ----------------------------------------------------------------------------------------

    def adapters(self, tenant: str | None = None) -> list[AdapterInfo]:
        """All adapters, or those of one tenant, by name."""
        with self._database.read() as connection:
            if tenant is None:
                return adapters.infos(connection)
            return adapters.infos(connection, "AND a.tenant = :tenant", tenant=check_segment(tenant, "tenant"))

    def adapter(self, name: AdapterName) -> AdapterInfo:
        with self._database.read() as connection:
            adapter = adapters.require(connection, name)
            return adapters.infos(connection, "AND a.id = :id", id=adapter.id)[0]

    def versions(self, name: AdapterName) -> list[Version]:
        """All versions of an adapter, retired ones too, by number."""
        with self._database.read() as connection:
            adapters.require(connection, name)
            return adapters.versions_of(connection, name)

    def version(self, name: AdapterName, number: int) -> Version:
        with self._database.read() as connection:
            return adapters.require_version(connection, adapters.require(connection, name), number)

    def remove(self, name: AdapterName, *, actor: str) -> None:
        """Retire an adapter with all versions and aliases. A later push under its name goes on with the numbers."""
        with self._database.write() as connection:
            adapters.remove(connection, name, actor)

    def retire_version(self, name: AdapterName, number: int, *, actor: str) -> None:
        """End the serving of one version; `Conflict` while an alias points at it."""
        with self._database.write() as connection:
            adapters.retire_version(connection, name, number, actor)

    # --- aliases ------------------------------------------------------------------------------------------------------

    def promote(self, name: AdapterName, number: int, *, actor: str) -> None:
        """Make a version live. If it was the canary, the canary ends; if it is live already, nothing changes."""
        with self._database.write() as connection:
            adapter = adapters.require(connection, name)
            version = adapters.require_version(connection, adapter, number, ready=True)
            publishing.make_live(connection, adapter, version, actor)

    def rollback(self, name: AdapterName, *, actor: str) -> int:
        """Make live what was live before, and return its number. Called again it goes one promotion further back.

        Retired versions are passed over; `Conflict` where no earlier one is left.
        """
        with self._database.write() as connection:
            adapter = adapters.require(connection, name)
            changes = aliases.history(connection, adapter.id, LIVE)
            number = aliases.rollback_target(changes, adapters.ready_numbers(connection, adapter))
            if number is None:
                raise Conflict(f"'{name}' has no earlier live version", "promote the version that you want")
            version = adapters.require_version(connection, adapter, number, ready=True)
            aliases.point(connection, adapter.id, LIVE, number, actor, aliases.ROLLBACK)
            journal.record(connection, actor, "version.rollback", version.ref)
            return number

    def set_canary(self, name: AdapterName, number: int | None, weight: float, *, actor: str) -> None:
        """Send the share `weight` (0 to 1) of the requests for `name` to a version; None ends the canary."""
        if not (math.isfinite(weight) and 0 <= weight <= 1):
            raise InvalidInput(f"{weight} is not a share of traffic", "give a number from 0 to 1, or a percentage")
        with self._database.write() as connection:
            adapter = adapters.require(connection, name)
            if number is not None:
                adapters.require_version(connection, adapter, number, ready=True)
            aliases.set_canary(connection, adapter.id, number, weight, actor)
            journal.record(connection, actor, "canary.set", name, number=number, weight=weight)

    def set_alias(self, name: AdapterName, alias: str, number: int, *, actor: str) -> None:
        """Point an alias at a version. `live` is promoted; the canary, which has a weight, has its own call."""
        check_alias(alias)
        if alias == LIVE:
            return self.promote(name, number, actor=actor)
        if alias == CANARY:
            raise InvalidInput("the canary needs a share of traffic", "use `manylora adapter canary NAME@vN 5%`")
        with self._database.write() as connection:
            adapter = adapters.require(connection, name)
            adapters.require_version(connection, adapter, number, ready=True)
            if aliases.point(connection, adapter.id, alias, number, actor):
                journal.record(connection, actor, "alias.set", name, alias=alias, number=number)
        return None

    def remove_alias(self, name: AdapterName, alias: str, *, actor: str) -> None:
        """Remove an alias; `Conflict` for `live`, without which the adapter's plain name would mean nothing."""
        check_alias(alias)
        if alias == LIVE:
            raise Conflict(f"'{name}' needs its alias live", "promote another version, or remove the adapter")
        with self._database.write() as connection:
            adapter = adapters.require(connection, name)
            if not aliases.drop(connection, adapter.id, alias, actor):
                raise NotFound(f"'{name}' has no alias '{alias}'", "see `manylora adapter show`")
            if alias == CANARY:
                aliases.set_canary(connection, adapter.id, None, 0.0, actor)
            journal.record(connection, actor, "alias.remove", name, alias=alias)

    def alias_history(self, name: AdapterName, alias: str) -> list[AliasChange]:
        """All changes of one alias, oldest first."""
        with self._database.read() as connection:
            return aliases.history(connection, adapters.require(connection, name).id, check_alias(alias))

    # --- tenants, keys, grants ----------------------------------------------------------------------------------------

    def create_tenant(self, name: str, *, actor: str) -> None:
        """Add a tenant; `Conflict` where it exists."""
        with self._database.write() as connection:
            tenants.create(connection, name, actor)

    def tenants(self) -> list[TenantInfo]:
        with self._database.read() as connection:
            return tenants.every(connection)

    def remove_tenant(self, name: str, *, actor: str) -> None:
        """Close a tenant that owns no adapters any more: its keys are revoked, its grants ended.

        Raises `Conflict` while it owns some: they may be serving.
        """
        with self._database.write() as connection:
            owned = adapters.of_tenant(connection, name)
            if owned:
                raise Conflict(
                    f"the tenant '{name}' still owns {len(owned)} adapters, among them '{owned[0]}'",
                    "remove them first: manylora adapter remove NAME",
                )
            tenants.remove(connection, name, actor)

    def create_key(self, tenant: str, *, label: str = "", is_admin: bool = False, actor: str) -> tuple[str, KeyInfo]:
        """A new API key, which is returned here and never again, and what is kept of it."""
        with self._database.write() as connection:
            return tenants.create_key(connection, tenant, label, is_admin, actor)

    def keys(self, tenant: str | None = None) -> list[KeyInfo]:
        """All keys, or those of one tenant; revoked ones too."""
        with self._database.read() as connection:
            return tenants.keys(connection, tenant)

    def revoke_key(self, key_id: str, *, actor: str) -> None:
        """End a key; ending it twice is no error."""
        with self._database.write() as connection:
            tenants.revoke_key(connection, key_id, actor)

    def authenticate(self, key: str) -> Principal | None:
        """Whose key this is, or None where it is unknown or revoked."""
        with self._database.read() as connection:
            return tenants.authenticate(connection, key)

    def grant(self, grantee: str, owner: str, pattern: str, *, actor: str) -> None:
        """Let `grantee` call the adapters of `owner` whose name matches `pattern`; twice is no error."""
        with self._database.write() as connection:
            tenants.grant(connection, Grant(grantee, owner, pattern), actor)

    def revoke_grant(self, grantee: str, owner: str, pattern: str, *, actor: str) -> None:
        """Take a grant back, or `NotFound`."""
        with self._database.write() as connection:
            tenants.revoke_grant(connection, Grant(grantee, owner, pattern), actor)

    def grants(self, tenant: str | None = None) -> list[Grant]:
        """The grants that `tenant` received, or all."""
        with self._database.read() as connection:
            return tenants.grants_of(connection, tenant)

    # --- admission and audit ------------------------------------------------------------------------------------------

    def resolve(self, tenant: str, selector: Selector, *, sticky: str = "") -> Version:
        """The version that answers `tenant`'s request for `selector`; `NotFound`, in one wording, where none may.

        Where neither number nor alias was written and a canary runs, `sticky` decides: the same text always gets the
        same side. An empty one is sent by chance.
        """
        with self._database.read() as connection:
            return admission.resolve(connection, tenant, selector, sticky)

    def visible(self, tenant: str) -> list[AdapterInfo]:
        """The adapters that `tenant` may call, by name."""
        with self._database.read() as connection:
            return admission.visible(connection, tenant)

    def audit(self, limit: int = 100) -> list[AuditEntry]:
        """The newest entries of the audit log, newest first."""
        with self._database.read() as connection:
            return journal.entries(connection, limit)
