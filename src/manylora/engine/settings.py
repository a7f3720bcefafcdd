"""What the engine's processes read from the environment, once each; `manylora.engine.launch` sets it for its child."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manylora.settings import read_seconds

DISK_TIER = "MANYLORA_ENGINE_DISK_TIER"
ADMISSION_WAIT_S = "MANYLORA_ENGINE_ADMISSION_WAIT_S"
LOAD_TIMEOUT_S = "MANYLORA_ENGINE_LOAD_TIMEOUT_S"
ALLOW_UNTESTED_VLLM = "MANYLORA_ALLOW_UNTESTED_VLLM"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine process. Without a disk tier the plugin serves what vLLM itself is asked to load."""

    disk_tier: Path | None
    """Folder of digest-named adapter folders; the only place that adapters are read from."""
    admission_wait_s: float
    """Longest that a request waits for a place among the adapters in host memory."""
    load_timeout_s: float
    """Longest that one load from disk to host memory may take."""
    allow_untested_vllm: bool
    """Start on a vLLM version outside the tested list, if its seams have the expected shape."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> EngineSettings:
        """Read the settings; raise `InvalidSettings` naming the variable that cannot be used."""
        source = os.environ if env is None else env
        tier = source.get(DISK_TIER)
        return cls(
            disk_tier=Path(tier) if tier else None,
            admission_wait_s=read_seconds(source, ADMISSION_WAIT_S, 30.0),
            load_timeout_s=read_seconds(source, LOAD_TIMEOUT_S, 60.0),
            allow_untested_vllm=source.get(ALLOW_UNTESTED_VLLM, "") in {"1", "true", "yes"},
        )
