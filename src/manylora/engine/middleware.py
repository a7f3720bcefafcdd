"""The door of `manylora.engine.http`, hung into vLLM's API server (`--middleware`)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from manylora.engine import vllm_internals as vllm_seam
from manylora.engine.http import AdapterDoor, App
from manylora.engine.metrics import EngineMetrics
from manylora.engine.residency import Residency, Resident
from manylora.engine.settings import EngineSettings
from manylora.engine.worker_calls import WorkerMemory


class AdapterMiddleware(AdapterDoor):
    """Made by vLLM with its application as the only argument; the rest comes from the environment."""

    def __init__(self, app: App) -> None:
        settings, metrics = EngineSettings.from_env(), EngineMetrics()

        def connect(state: Any) -> tuple[Residency, WorkerMemory]:
            run_dir = settings.run_dir or Path(tempfile.mkdtemp(prefix="manylora-"))
            workers = WorkerMemory(vllm_seam.engine_client(state), run_dir=run_dir, timeout_s=settings.load_timeout_s)
            account = Residency(
                workers,
                places=vllm_seam.max_adapters(state),
                wait_s=settings.admission_wait_s,
                observer=metrics,
                published=_announcer(vllm_seam.served_adapters(state)),
            )
            return account, workers

        super().__init__(app, settings=settings, metrics=metrics, connect=connect)


def _announcer(served: dict[str, vllm_seam.LoRARequest]) -> Any:
    """Keep vLLM's list of model names equal to what is in memory."""

    def published(resident: Resident, present: bool) -> None:
        if not present:
            served.pop(resident.engine_name, None)
            return
        served[resident.engine_name] = vllm_seam.LoRARequest(
            lora_name=resident.engine_name, lora_int_id=resident.lora_id, lora_path=str(resident.folder)
        )

    return published
