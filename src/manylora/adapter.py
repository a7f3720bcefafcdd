"""What an adapter is called: names, versions and the selectors that callers write.

Grammar (`segment` is 1–63 characters of ``[a-z0-9._-]`` that start and end with a letter or digit, without ``..``):

    adapter name   tenant/name                         acme/support
    version        tenant/name@vN                      acme/support@v7
    engine name    tenant/name@vN-<16 hex of digest>   acme/support@v7-3f9c2a1b0d4e5f60
    selector       [tenant/]name[@vN | @alias]         support, acme/support@canary

A version is identified by its digest; the engine name carries a prefix of it, so a name whose content changed is
another name to the engine, and the key of its prefix cache follows. Nothing here touches a disk, a database or a
network, and no name is ever joined to a path: files are found by digest alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from manylora.errors import InvalidName

SEGMENT_MAX_CHARS = 63
DIGEST_HEX_CHARS = 64
ENGINE_DIGEST_CHARS = 16
LIVE = "live"
CANARY = "canary"

_SEGMENT = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
_VERSION = re.compile(r"v([1-9][0-9]{0,8})")
_ENGINE_SUFFIX = re.compile(rf"v([1-9][0-9]{{0,8}})-([0-9a-f]{{{ENGINE_DIGEST_CHARS}}})")
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_HEX_CHARS}}}")
_GRAMMAR_HINT = "use 1-63 lower-case letters, digits, '.', '_' or '-', starting and ending with a letter or digit"


def shown(text: str, limit: int = 80) -> str:
    """`text` made safe for a log line or an error message: printable ASCII, at most `limit` characters."""
    head = ascii(text[:limit])[1:-1]
    return head if len(text) <= limit and len(head) <= limit else head[:limit] + "…"


def check_segment(text: str, what: str) -> str:
    """Return `text` if it is a valid segment; raise `InvalidName` naming `what` otherwise."""
    if not _SEGMENT.fullmatch(text) or ".." in text:
        raise InvalidName(f"{what} '{shown(text)}' is not a valid name", _GRAMMAR_HINT)
    return text


def check_alias(text: str) -> str:
    """Return `text` if it may name an alias: a segment that cannot be read as a version number."""
    check_segment(text, "alias")
    if _VERSION.fullmatch(text) or _ENGINE_SUFFIX.fullmatch(text):
        raise InvalidName(f"alias '{shown(text)}' looks like a version", "choose a word such as 'live' or 'canary'")
    return text


def check_digest(text: str) -> str:
    """Return `text` if it is 64 lower-case hex characters; raise `InvalidName` otherwise."""
    if not _DIGEST.fullmatch(text):
        raise InvalidName(f"'{shown(text)}' is not a SHA-256 digest", "give 64 lower-case hexadecimal characters")
    return text


@dataclass(frozen=True, slots=True, order=True)
class AdapterName:
    """A name owned by a tenant."""

    tenant: str
    name: str

    def __post_init__(self) -> None:
        check_segment(self.tenant, "tenant")
        check_segment(self.name, "adapter")

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}"

    @classmethod
    def parse(cls, text: str, *, default_tenant: str | None = None) -> AdapterName:
        """Read ``tenant/name``, or ``name`` alone where a default tenant is given."""
        tenant, slash, name = text.partition("/")
        if slash:
            return cls(tenant, name)
        if default_tenant is None:
            raise InvalidName(f"'{shown(text)}' lacks a tenant", "write TENANT/ADAPTER")
        return cls(default_tenant, tenant)


@dataclass(frozen=True, slots=True)
class VersionRef:
    """One immutable version: its adapter, its number within that adapter (from 1) and its digest (64 hex)."""

    adapter: AdapterName
    number: int
    digest: str

    def __post_init__(self) -> None:
        assert self.number >= 1
        check_digest(self.digest)

    def __str__(self) -> str:
        return f"{self.adapter}@v{self.number}"

    @property
    def engine_name(self) -> str:
        """The only name by which the engine knows this version."""
        return f"{self}-{self.digest[:ENGINE_DIGEST_CHARS]}"


@dataclass(frozen=True, slots=True)
class EngineName:
    """An engine name taken apart; `digest_prefix` has 16 hex characters."""

    adapter: AdapterName
    number: int
    digest_prefix: str

    @classmethod
    def parse(cls, text: str) -> EngineName:
        """Read an engine name; raise `InvalidName` for anything else, however long or odd."""
        if len(text) > 3 * SEGMENT_MAX_CHARS:
            raise InvalidName("the model name is too long to be an adapter's")
        name, at, suffix = text.partition("@")
        match = _ENGINE_SUFFIX.fullmatch(suffix)
        if not at or match is None:
            raise InvalidName(f"'{shown(text)}' is not an engine's adapter name")
        return cls(AdapterName.parse(name), int(match[1]), match[2])


@dataclass(frozen=True, slots=True)
class Selector:
    """What a caller wrote as `model`: an adapter, and a version number or an alias (neither: follow `live`)."""

    adapter: AdapterName
    number: int | None = None
    alias: str | None = None

    def __str__(self) -> str:
        if self.number is not None:
            return f"{self.adapter}@v{self.number}"
        return f"{self.adapter}@{self.alias}" if self.alias else str(self.adapter)

    @classmethod
    def parse(cls, text: str, *, default_tenant: str | None = None) -> Selector:
        """Read ``[tenant/]name[@vN|@alias]``; raise `InvalidName` for anything outside the grammar."""
        if len(text) > 3 * SEGMENT_MAX_CHARS + 2:
            raise InvalidName("the model name is too long to be an adapter's", _GRAMMAR_HINT)
        name, at, which = text.partition("@")
        adapter = AdapterName.parse(name, default_tenant=default_tenant)
        if not at:
            return cls(adapter)
        if match := _VERSION.fullmatch(which):
            return cls(adapter, number=int(match[1]))
        return cls(adapter, alias=check_alias(which))
