"""Methods that vLLM adds to its worker class (`--worker-extension-cls`), called by name from the API server.

Every call returns at once. Reading an adapter runs in one loader thread per worker, so that a step in progress goes on;
its result waits here until the API server asks for it between two steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from manylora.engine import vllm_internals as vllm_seam
from manylora.engine.adapter_manager import AdapterManager, PreparedAdapter, reason
from manylora.engine.worker_calls import FAILED, FULL, PENDING, READY
from manylora.kernels.pool import PoolFull

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0002


@dataclass(slots=True)
class _Load:
    """One read in progress."""

    request: vllm_seam.LoRARequest
    future: Future[PreparedAdapter]
    started_s: float


@dataclass(slots=True)
class _Loader:
    """The loader thread of a worker and what it is reading, by adapter id."""

    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "manylora-load", initializer=_use_every_core)
    )
    loads: dict[int, _Load] = field(default_factory=dict)


def _use_every_core() -> None:
    """Free the calling thread from the core that vLLM's CPU worker pins its process to: the steps run there.

    It is not nice: preempted while it holds the interpreter, it would keep the steps waiting too.
    """
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
        """Start reading an adapter from its folder."""
        if self.manylora_loader is None:
            # The step loop gives the interpreter away around every operation, and would get it back from a loader in
            # the midst of Python code 5 ms later only, each time.
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            self.manylora_loader = _Loader()
        request = vllm_seam.LoRARequest(lora_name=engine_name, lora_int_id=lora_id, lora_path=folder)
        future = self.manylora_loader.thread.submit(self.manylora_manager().prepare, request)
        self.manylora_loader.loads[lora_id] = _Load(request, future, time.monotonic())

    def manylora_register(self, lora_id: int) -> dict[str, Any]:
        """Take over what was read: its state, and once ready its bytes, seconds and the modules not on this worker.

        In state `FULL` it keeps what was read, for another try once something was forgotten.
        """
        assert self.manylora_loader is not None
        load = self.manylora_loader.loads.get(lora_id)
        if load is None:  # this worker had given its final word while another was still reading
            return {"state": PENDING}
        if not load.future.done():
            return {"state": PENDING}
        try:
            prepared = load.future.result()
            self.manylora_manager().register(prepared)
        except PoolFull:
            return {"state": FULL}
        except Exception as error:  # a load may fail in any way; it must harm its own requests only
            del self.manylora_loader.loads[lora_id]
            log.warning("adapter %s cannot be loaded: %s", load.request.lora_name, error)
            return {"state": FAILED, "reason": reason(error, load.request.lora_path)}
        del self.manylora_loader.loads[lora_id]
        return {
            "state": READY,
            "bytes": prepared.packed.nbytes,
            "seconds": time.monotonic() - load.started_s,
            "unknown": list(prepared.unknown),
        }

    def manylora_forget(self, lora_id: int) -> int:
        """Drop an adapter, and a read of it still in progress; returns the bytes freed."""
        if self.manylora_loader is not None:
            self.manylora_loader.loads.pop(lora_id, None)
        return self.manylora_manager().forget(lora_id)

    def manylora_residency(self) -> dict[str, Any]:
        """What is in this worker's adapter memory, and how large that is."""
        manager = self.manylora_manager()
        return {
            "adapters": manager.active(),
            "budget_bytes": manager.store.budget_bytes,
            "used_bytes": manager.store.used_bytes,
            "in_step_loads": manager.in_step_loads,
        }
