"""What the engine's processes read from the environment, once each; `manylora.engine.launch` sets it for its child."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manylora.errors import InvalidSettings
from manylora.settings import DEFAULT_ADAPTER_MEMORY, read_seconds

DISK_TIER = "MANYLORA_ENGINE_DISK_TIER"
ADAPTER_MEMORY = "MANYLORA_ENGINE_ADAPTER_MEMORY"
ADMISSION_WAIT_S = "MANYLORA_ENGINE_ADMISSION_WAIT_S"
LOAD_TIMEOUT_S = "MANYLORA_ENGINE_LOAD_TIMEOUT_S"
ALLOW_UNTESTED_VLLM = "MANYLORA_ALLOW_UNTESTED_VLLM"


_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class AdapterMemorySize:
    """A number of bytes, or a share of the device's memory (on a CPU, of the machine's)."""

    bytes_: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> AdapterMemorySize:
        """Read ``12%``, ``8GiB``, ``512MiB`` or a plain number of bytes; raise `InvalidSettings` for anything else."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|KiB|MiB|GiB|)\s*", text)
        if found is not None:
            number, unit = float(found[1]), found[2]
            if unit == "%" and 0 < number <= 90:
                return cls(share=number / 100)
            if unit != "%" and int(number * _UNITS[unit]) > 0:
                return cls(bytes_=int(number * _UNITS[unit]))
        raise InvalidSettings(
            f"adapter memory of {text!r} cannot be used", "give a share up to 90%, or a size such as 8GiB or 512MiB"
        )

    def of(self, total_bytes: int) -> int:
        """Bytes on a device that has `total_bytes`."""
        return self.bytes_ if self.bytes_ is not None else int((self.share or 0.0) * total_bytes)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine process. Without a disk tier the plugin serves what vLLM itself is asked to load."""

    disk_tier: Path | None
    """Folder of digest-named adapter folders; the only place that adapters are read from."""
    adapter_memory: AdapterMemorySize
    """How much memory adapters may take where they are computed with."""
    admission_wait_s: float
    """Longest that a request waits for room in adapter memory."""
    load_timeout_s: float
    """Longest that reading one adapter from disk may take."""
    allow_untested_vllm: bool
    """Start on a vLLM version outside the tested list, if its seams have the expected shape."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> EngineSettings:
        """Read the settings; raise `InvalidSettings` naming the variable that cannot be used."""
        source = os.environ if env is None else env
        tier = source.get(DISK_TIER)
        return cls(
            disk_tier=Path(tier) if tier else None,
            adapter_memory=AdapterMemorySize.parse(source.get(ADAPTER_MEMORY) or DEFAULT_ADAPTER_MEMORY),
            admission_wait_s=read_seconds(source, ADMISSION_WAIT_S, 30.0),
            load_timeout_s=read_seconds(source, LOAD_TIMEOUT_S, 60.0),
            allow_untested_vllm=source.get(ALLOW_UNTESTED_VLLM, "") in {"1", "true", "yes"},
        )
