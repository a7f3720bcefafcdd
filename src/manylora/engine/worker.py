"""Methods that vLLM adds to its worker class (`--worker-extension-cls`), called by name from the API server.

Every call returns at once. Reading an adapter runs in one loader thread per worker, so that a step in progress goes on;
its result waits here until the API server asks for it between two steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from manylora.engine import vllm_internals as vllm_seam
from manylora.engine.adapter_manager import AdapterManager, host_bytes, reason
from manylora.engine.worker_calls import FAILED, PENDING, READY

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Load:
    """One read in progress."""

    request: vllm_seam.LoRARequest
    future: Future[tuple[vllm_seam.LoRAModel, tuple[str, ...]]]
    started_s: float


@dataclass(slots=True)
class _Loader:
    """The loader thread of a worker and what it is reading, by adapter id."""

    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "manylora-load", initializer=_use_every_core)
    )
    loads: dict[int, _Load] = field(default_factory=dict)


def _use_every_core() -> None:
    """Free the calling thread from the core that vLLM's CPU worker pins its process to: the steps run there."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


class AdapterWorker:
    """The extension; every attribute starts with `manylora_`, as it lives in vLLM's worker object."""

    manylora_loader: _Loader | None = None

    def manylora_manager(self) -> AdapterManager:
        """This worker's adapter manager; a clear error if another plugin replaced it."""
        manager = vllm_seam.worker_lora_manager(self)
        assert isinstance(manager, AdapterManager), f"the LoRA manager is a {type(manager).__name__}, not manylora's"
        return manager

    def manylora_prepare(self, lora_id: int, engine_name: str, folder: str) -> None:
        """Start reading an adapter from its folder into host memory."""
        if self.manylora_loader is None:
            self.manylora_loader = _Loader()
        request = vllm_seam.LoRARequest(lora_name=engine_name, lora_int_id=lora_id, lora_path=folder)
        future = self.manylora_loader.thread.submit(self.manylora_manager().prepare, request)
        self.manylora_loader.loads[lora_id] = _Load(request, future, time.monotonic())

    def manylora_register(self, lora_id: int) -> dict[str, Any]:
        """Take over what was read: its state, and once ready its bytes, seconds and the modules not on this worker."""
        assert self.manylora_loader is not None
        load = self.manylora_loader.loads.get(lora_id)
        if load is None:  # this worker had given its final word while another was still reading
            return {"state": PENDING}
        if not load.future.done():
            return {"state": PENDING}
        del self.manylora_loader.loads[lora_id]
        try:
            lora, unknown = load.future.result()
            self.manylora_manager().register(lora)
        except Exception as error:  # a load may fail in any way; it must harm its own requests only
            log.warning("adapter %s cannot be loaded: %s", load.request.lora_name, error)
            return {"state": FAILED, "reason": reason(error, load.request.lora_path)}
        seconds = time.monotonic() - load.started_s
        modules = len(lora.loras)
        return {
            "state": READY,
            "bytes": host_bytes(lora),
            "seconds": seconds,
            "unknown": list(unknown),
            "fused": modules,
        }

    def manylora_forget(self, lora_id: int) -> int:
        """Drop an adapter's host and device copies, and a read of it still in progress; returns the bytes freed."""
        if self.manylora_loader is not None:
            self.manylora_loader.loads.pop(lora_id, None)
        return self.manylora_manager().forget(lora_id)

    def manylora_residency(self) -> dict[str, Any]:
        """What is where on this worker, and how often a device slot changed hands."""
        manager = self.manylora_manager()
        return {
            "device": manager.active(),
            "device_slots": vllm_seam.device_slots(manager),
            "device_evictions": manager.device_evictions,
            "in_step_loads": manager.in_step_loads,
        }
