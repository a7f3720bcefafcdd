"""What the engine's processes read from the environment, once each; `manylora.engine.launch` sets it for its child."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manylora.settings import DEFAULT_ADAPTER_MEMORY, MemorySize, read_seconds

DISK_TIER = "MANYLORA_ENGINE_DISK_TIER"
RUN_DIR = "MANYLORA_ENGINE_RUN_DIR"
AGENT_SOCKET = "MANYLORA_ENGINE_AGENT_SOCKET"
ADAPTER_MEMORY = "MANYLORA_ENGINE_ADAPTER_MEMORY"
ADMISSION_WAIT_S = "MANYLORA_ENGINE_ADMISSION_WAIT_S"
LOAD_TIMEOUT_S = "MANYLORA_ENGINE_LOAD_TIMEOUT_S"
ALLOW_UNTESTED_VLLM = "MANYLORA_ALLOW_UNTESTED_VLLM"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine process. Without a disk tier the plugin serves what vLLM itself is asked to load."""

    disk_tier: Path | None
    """Folder of digest-named adapter folders; the only place that adapters are read from."""
    run_dir: Path | None
    """Private folder in which workers listen for loads; None: one is made."""
    agent_socket: Path | None
    """Where the node's agent listens; None: workers read and pack adapters themselves."""
    adapter_memory: MemorySize
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
        tier, run_dir, agent = (source.get(name) for name in (DISK_TIER, RUN_DIR, AGENT_SOCKET))
        return cls(
            disk_tier=Path(tier) if tier else None,
            run_dir=Path(run_dir) if run_dir else None,
            agent_socket=Path(agent) if agent else None,
            adapter_memory=MemorySize.parse(source.get(ADAPTER_MEMORY) or DEFAULT_ADAPTER_MEMORY),
            admission_wait_s=read_seconds(source, ADMISSION_WAIT_S, 30.0),
            load_timeout_s=read_seconds(source, LOAD_TIMEOUT_S, 60.0),
            allow_untested_vllm=source.get(ALLOW_UNTESTED_VLLM, "") in {"1", "true", "yes"},
        )
