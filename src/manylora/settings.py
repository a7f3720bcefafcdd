"""The settings of a process, read once from the environment; nothing else in manylora reads `os.environ`.

Every variable is `MANYLORA_` plus the field's name in upper case, and is listed in `docs/settings.md`. Command-line
flags override a field with `dataclasses.replace`. The engine's own processes read `manylora.engine.settings` instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from manylora.errors import InvalidSettings

PREFIX = "MANYLORA_"
KIB = 1024
MIB = 1024 * KIB

DEFAULT_ADAPTER_MEMORY = "12%"
"""A share of the device's memory: about a hundred adapters of rank 32 for a model of 8 billion parameters on 141 GB."""


DEFAULT_HOST_MEMORY = "10%"
"""A share of the machine's memory, for packed adapters that the node's agent keeps ready."""

DEFAULT_DISK_BUDGET = "100GiB"

_UNITS = {"": 1, "KiB": KIB, "MiB": MIB, "GiB": 1024 * MIB}


@dataclass(frozen=True, slots=True)
class MemorySize:
    """A number of bytes, or a share of some memory: a device's or a machine's."""

    bytes_: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str, what: str = "adapter memory") -> MemorySize:
        """Read ``12%``, ``8GiB``, ``512MiB`` or a plain number of bytes; raise `InvalidSettings` for anything else."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|KiB|MiB|GiB|)\s*", text)
        if found is not None:
            number, unit = float(found[1]), found[2]
            if unit == "%" and 0 < number <= 90:
                return cls(share=number / 100)
            if unit != "%" and int(number * _UNITS[unit]) > 0:
                return cls(bytes_=int(number * _UNITS[unit]))
        raise InvalidSettings(
            f"{what} of {text!r} cannot be used", "give a share up to 90%, or a size such as 8GiB or 512MiB"
        )

    def of(self, total_bytes: int) -> int:
        """Bytes of a memory that has `total_bytes`."""
        return self.bytes_ if self.bytes_ is not None else int((self.share or 0.0) * total_bytes)


@dataclass(frozen=True, slots=True)
class Settings:
    """Where things are and how much of each is allowed. Byte and second values carry their unit in the name."""

    home: Path
    """Folder for everything that is not given its own place: registry, blobs, disk tier, sockets and logs."""
    database_url: str
    """SQLAlchemy URL of the registry's index."""
    blob_url: str
    """Object store URL of the adapters' bytes."""
    disk_tier: Path
    """Folder of digest-named adapter folders that the engine reads."""
    run_dir: Path
    """Sockets, process ids and logs of the running processes; mode 0700."""
    host: str
    port: int
    max_body_bytes: int
    """Largest request body that the gateway reads."""
    adapter_memory: str
    """Memory for adapters where they are computed with: a share of the device's such as 12%, or a size such as 8GiB."""
    host_memory: str
    """Host memory in which the agent keeps packed adapters ready: a share of the machine's, or a size."""
    disk_budget: str
    """How much of the disk adapters may take, their packed forms included: a share of it, or a size."""
    max_adapter_bytes: int
    """Largest adapter file that may be published."""
    adapter_roots: tuple[Path, ...]
    """Folders under which `/v1/load_lora_adapter` may read; empty: the route refuses every path."""
    upstream_timeout_s: float
    """Longest silence of the engine within one request before the gateway gives up."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, *, home: Path | None = None) -> Settings:
        """Read the settings; `home` overrides its variable; raise `InvalidSettings` naming what cannot be used."""
        read = _Reader(os.environ if env is None else env)
        read.refuse_unknown({field.name for field in fields(cls)})
        home = read.path("home", Path.home() / ".manylora") if home is None else home.expanduser().absolute()
        return cls(
            home=home,
            database_url=read.text("database_url", f"sqlite:///{home / 'registry.db'}"),
            blob_url=read.text("blob_url", f"file://{home / 'blobs'}"),
            disk_tier=read.path("disk_tier", home / "disk"),
            run_dir=read.path("run_dir", home / "run"),
            host=read.text("host", "127.0.0.1"),
            port=read.integer("port", 8000, 0, 65535),
            max_body_bytes=read.integer("max_body_bytes", 8 * MIB, KIB, 1024 * MIB),
            adapter_memory=read.text("adapter_memory", DEFAULT_ADAPTER_MEMORY),
            host_memory=read.text("host_memory", DEFAULT_HOST_MEMORY),
            disk_budget=read.text("disk_budget", DEFAULT_DISK_BUDGET),
            max_adapter_bytes=read.integer("max_adapter_bytes", 4096 * MIB, KIB, 1024 * 1024 * MIB),
            adapter_roots=read.paths("adapter_roots"),
            upstream_timeout_s=read.seconds("upstream_timeout_s", 600.0),
        )

    def child_env(self) -> dict[str, str]:
        """The environment for a child process: this process's own, and these settings in full."""
        own = {PREFIX + field.name.upper(): _written(getattr(self, field.name)) for field in fields(self)}
        return {**os.environ, **own}


def _written(value: object) -> str:
    """A setting as its variable holds it."""
    return os.pathsep.join(map(str, value)) if isinstance(value, tuple) else str(value)


# Read by the engine's processes (`manylora.engine.settings`), or by the build; not misspelt settings of ours.
_OF_OTHERS = ("ENGINE_", "ALLOW_UNTESTED_VLLM", "BENCH_", "TEST_", "API_KEY")


class _Reader:
    """Typed look-ups that name the variable in every complaint."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def refuse_unknown(self, known: set[str]) -> None:
        names = {PREFIX + name.upper() for name in known}
        for variable in self._env:
            ours = variable.startswith(PREFIX) and not variable.removeprefix(PREFIX).startswith(_OF_OTHERS)
            if ours and variable not in names:
                raise InvalidSettings(f"{variable} is not a setting", "docs/settings.md lists them all")

    def text(self, name: str, default: str) -> str:
        return self._env.get(PREFIX + name.upper(), "") or default

    def path(self, name: str, default: Path) -> Path:
        return Path(self.text(name, str(default))).expanduser().absolute()

    def paths(self, name: str) -> tuple[Path, ...]:
        return tuple(Path(part).expanduser().resolve() for part in self.text(name, "").split(os.pathsep) if part)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        text = self.text(name, str(default))
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise InvalidSettings(f"{PREFIX}{name.upper()}={text!r}", f"give a whole number from {low} to {high}")
        return int(text)

    def seconds(self, name: str, default: float) -> float:
        return read_seconds(self._env, PREFIX + name.upper(), default)


def read_seconds(env: Mapping[str, str], variable: str, default: float) -> float:
    """A number of seconds from the environment; unset and empty mean the default."""
    text = env.get(variable) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise InvalidSettings(f"{variable}={text!r}", "give a positive number of seconds")
    return value
