"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter` in vLLM's form, for automation that speaks it.

A load publishes a folder of an allowed root to the registry and makes it live; an unload retires the adapter. Needs an
admin key. Nothing here is forwarded to routes of that name on the engine: it has none.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from manylora.adapter import AdapterName, shown
from manylora.errors import InvalidInput, NotFound
from manylora.gateway import request_body
from manylora.gateway.admission import Admission, Caller
from manylora.gateway.engine_client import EngineClient
from manylora.gateway.exchange import exchange_of
from manylora.gateway.fetch import Fetcher
from manylora.gateway.problems import Problem, Refusal, bad_request
from manylora.gateway.registry_threads import Threads
from manylora.registry.catalog import Catalog
from manylora.registry.records import Published, Version
from manylora.settings import Settings
from manylora.telemetry import fields

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

logger = logging.getLogger(__name__)


class LoadRequest(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None


R = TypeVar("R", LoadRequest, UnloadRequest)


class LoraApi:
    """The two management routes."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        admission: Admission,
        fetcher: Fetcher,
        engine: EngineClient,
        base_model_name: str,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._admission = admission
        self._fetcher = fetcher
        self._engine = engine
        self._base_model_name = base_model_name
        # Publishing takes as long as hashing and storing take; one at a time is what the object store likes best, too.
        self._threads = Threads("registry", 1, timeout_s=None)

    async def load(self, request: Request) -> Response:
        caller, wanted = await self._read(request, LoadRequest)
        if wanted.is_3d_lora_weight:
            raise bad_request("'is_3d_lora_weight' is not supported.", "is_3d_lora_weight")
        name = self._name(caller, wanted.lora_name)
        published = await self._threads.call(self._publish, name, wanted, caller.principal.key_id)
        await self._fetcher.ensure(published.version.digest)
        exchange_of(request.scope).version = published.version.ref.engine_name
        return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        caller, wanted = await self._read(request, UnloadRequest)
        if wanted.lora_int_id is not None:
            raise bad_request("'lora_int_id' is not supported; an adapter is known by its name.", "lora_int_id")
        name = self._name(caller, wanted.lora_name)
        for version in await self._threads.call(self._retire, name, caller.principal.key_id):
            await self._evict(version)
        return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.")

    def close(self) -> None:
        self._threads.close()

    async def _read(self, request: Request, kind: type[R]) -> tuple[Caller, R]:
        exchange = exchange_of(request.scope)
        exchange.route = request.url.path
        caller = await self._admission.authenticate_admin(request.headers)
        exchange.tenant, exchange.key_id = caller.principal.tenant, caller.principal.key_id
        raw = await request_body.read_bytes(request.headers, request.receive, self._settings.max_body_bytes)
        request_body.refuse_repeated(raw, request_body.decode_fields(raw))
        try:
            return caller, msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise bad_request(f"The request cannot be used: {shown(str(error), 200)}") from None

    def _name(self, caller: Caller, lora_name: str) -> AdapterName:
        if lora_name == self._base_model_name:
            raise bad_request("This is the base model's name.", "lora_name")
        return AdapterName.parse(lora_name, default_tenant=caller.principal.tenant)

    def _publish(self, name: AdapterName, wanted: LoadRequest, actor: str) -> Published:
        folder = allowed_folder(wanted.lora_path, self._settings.adapter_roots)
        if not wanted.load_inplace and self._exists(name):
            taken = f"The lora adapter '{shown(wanted.lora_name)}' has already been loaded"
            raise bad_request(f"{taken}; set 'load_inplace' to replace it.", "lora_name")
        return self._catalog.publish(folder, name, base_model=self._base_model_name, actor=actor, promote=True)

    def _exists(self, name: AdapterName) -> bool:
        try:
            return bool(self._catalog.adapter(name).aliases)
        except NotFound:
            return False

    def _retire(self, name: AdapterName, actor: str) -> list[Version]:
        if not self._exists(name):
            raise NotFound(f"The lora adapter '{name}' cannot be found.")
        versions = self._catalog.versions(name)
        self._catalog.remove(name, actor=actor)
        return versions

    async def _evict(self, version: Version) -> None:
        """Free the engine's memory; the adapter is retired whether or not the engine can be asked just now."""
        try:
            await self._engine.evict(version.ref.engine_name)
        except Refusal as refusal:
            said = fields(version=version.ref.engine_name, reason=refusal.message)
            logger.warning("a retired version could not be evicted from the engine", extra=said)


def allowed_folder(text: str, roots: tuple[Path, ...]) -> Path:
    """The folder that `text` means, symbolic links followed; raises unless it and its files lie under a root.

    Whether something exists is told only under the roots.
    """
    try:
        folder = Path(text).resolve()
        inside = Path(text).is_absolute() and _under(folder, roots)
        if inside and not folder.is_dir():
            raise Refusal(
                Problem(404, "There is no adapter folder at 'lora_path'.", code="not_found", param="lora_path")
            )
        inside = inside and all(_under((folder / file).resolve(), roots) for file in ADAPTER_FILES)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidInput("'lora_path' cannot be read") from error
    if not inside:
        raise Refusal(
            Problem(
                403,
                "'lora_path' is outside the folders allowed for adapters.",
                "permission_error",
                "permission_denied",
                "lora_path",
            )
        )
    return folder


def _under(path: Path, roots: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(root.resolve()) for root in roots)
