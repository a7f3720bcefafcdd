"""Who calls, and which version answers: decided once a request, before anything reaches the engine.

What was decided is kept only while the registry's change number stands still, and that number is read for every
request: a key that was revoked or an alias that was moved by any process counts from the next request on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from manylora.adapter import Selector
from manylora.errors import InvalidName, NotFound, PermissionDenied, Unauthenticated
from manylora.gateway.problems import model_not_found
from manylora.gateway.registry_threads import ChangeWatch, Threads
from manylora.gateway.snapshot_cache import SnapshotCache
from manylora.registry.catalog import Catalog
from manylora.registry.records import AdapterInfo, Version
from manylora.tenant import Principal

KEY_MAX_CHARS = 256
MAX_KEYS = 4096
MAX_ROUTES = 16384
MAX_LISTS = 256

_NO_KEY = "No valid API key was given."
_KEY_HINT = "send 'Authorization: Bearer sk-…'"


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller, and the registry's change number as read for this request."""

    principal: Principal
    seq: int


@dataclass(frozen=True, slots=True)
class Target:
    """What answers a request: `version`, or the base model where it is None."""

    asked: str
    engine_model: str
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class _Route:
    version: Version
    engine_model: str
    splits: bool
    """Whether the caller's stickiness decides between two versions."""


class Admission:
    """Authenticates, authorises and resolves."""

    def __init__(self, catalog: Catalog, threads: Threads, changes: ChangeWatch, base_model_name: str) -> None:
        self._catalog = catalog
        self._threads = threads
        self._changes = changes
        self._base_model_name = base_model_name
        self._principals: SnapshotCache[bytes, Principal] = SnapshotCache(MAX_KEYS)
        self._routes: SnapshotCache[tuple[str, str, str], _Route] = SnapshotCache(MAX_ROUTES)
        self._lists: SnapshotCache[str, list[AdapterInfo]] = SnapshotCache(MAX_LISTS)

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """The caller behind the request's key; raises `Unauthenticated`."""
        key = key_of(headers)
        if key is None:
            raise Unauthenticated(_NO_KEY, _KEY_HINT)
        seq = await self._changes.seq()
        key_hash = hashlib.sha256(key.encode()).digest()
        principal = self._principals.get(seq, key_hash)
        if principal is None:
            principal = await self._threads.call(self._catalog.authenticate, key)
            if principal is None:
                raise Unauthenticated(_NO_KEY, _KEY_HINT)
            self._principals.put(seq, key_hash, principal)
        return Caller(principal, seq)

    async def authenticate_admin(self, headers: Mapping[str, str]) -> Caller:
        """As `authenticate`; raises `PermissionDenied` for a key that may not manage."""
        caller = await self.authenticate(headers)
        if not caller.principal.is_admin:
            raise PermissionDenied("This path needs an admin key.")
        return caller

    async def target(self, caller: Caller, model: str, sticky: Callable[[], str]) -> Target:
        """What `model` means for this caller; raises the same `model_not_found` whatever the reason."""
        if model == self._base_model_name:
            return Target(model, model)
        try:
            route = await self._route(caller, model, "")
            if route.splits:
                route = await self._route(caller, model, sticky())
        except (InvalidName, NotFound):
            raise model_not_found(model) from None
        if route.version.base_model != self._base_model_name:
            raise model_not_found(model)
        return Target(model, route.engine_model, route.version)

    async def visible(self, caller: Caller) -> list[AdapterInfo]:
        """The adapters of this base model that the caller may use."""
        tenant = caller.principal.tenant
        adapters = self._lists.get(caller.seq, tenant)
        if adapters is None:
            listed = await self._threads.call(self._catalog.visible, tenant)
            adapters = [info for info in listed if info.base_model == self._base_model_name]
            self._lists.put(caller.seq, tenant, adapters)
        return adapters

    async def _route(self, caller: Caller, model: str, sticky: str) -> _Route:
        key = (caller.principal.tenant, model, sticky)
        route = self._routes.get(caller.seq, key)
        if route is None:
            selector = Selector.parse(model, default_tenant=caller.principal.tenant)
            route = await self._threads.call(self._look_up, caller.principal.tenant, selector, sticky)
            self._routes.put(caller.seq, key, route)
        return route

    def _look_up(self, tenant: str, selector: Selector, sticky: str) -> _Route:
        version = self._catalog.resolve(tenant, selector, sticky=sticky)
        follows = selector.number is None and selector.alias is None
        splits = follows and self._catalog.adapter(selector.adapter).canary_weight > 0
        return _Route(version, version.ref.engine_name, splits)


def key_of(headers: Mapping[str, str]) -> str | None:
    """The API key that a request carries: `Authorization: Bearer`, else `x-api-key`."""
    authorization = headers.get("authorization")
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
    else:
        key = headers.get("x-api-key", "").strip()
    return key if key and len(key) <= KEY_MAX_CHARS and key.isascii() else None


def stickiness(tenant: str, headers: Mapping[str, str], fields: Mapping[str, msgspec.Raw]) -> str:
    """What keeps a conversation on one side of a canary: its session id, else how it began."""
    session = headers.get("x-session-id")
    start = session.encode() if session else b"".join(_conversation_start(fields))
    return hashlib.sha256(tenant.encode() + b"\0" + start).hexdigest()


_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_role = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _conversation_start(fields: Mapping[str, msgspec.Raw]) -> list[bytes]:
    """The bytes of the prompt, or of the messages up to the user's first: system prompts alone are all alike."""
    if "messages" not in fields:
        return [bytes(fields[name]) for name in ("prompt", "input") if name in fields]
    start: list[bytes] = []
    try:
        for message in _decode_list(fields["messages"]):
            start.append(bytes(message))
            if bytes(_decode_role(message).get("role", b"")) == b'"user"':
                break
    except (msgspec.DecodeError, RecursionError):
        pass  # malformed messages are the engine's to refuse
    return start
