"""Methods that vLLM adds to its worker class (`--worker-extension-cls`), called by name from the API server.

Loads come by a socket of their own and run in a few threads, beside the steps (`manylora.engine.load_channel`). An
adapter is dropped, and memory told of, between two steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manylora.engine import vllm_internals as vllm_seam
from manylora.engine.adapter_manager import AdapterManager, PreparedAdapter, reason
from manylora.engine.load_channel import FAILED, FULL, MEASURE, MISSING, READY, Load, LoadServer, Outcome, socket_path
from manylora.errors import ManyloraError, NotFound
from manylora.kernels.pool import PoolFull

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0002


@dataclass(slots=True)
class _Progress:
    """One load: what it has got so far, and whether it is still wanted."""

    prepared: PreparedAdapter | None = None
    running: bool = True
    dropped: bool = False


@dataclass(slots=True)
class Loader:
    """A worker's loads, by adapter id. `load` runs in any thread, `drop` in the step loop's."""

    manager: AdapterManager
    _loads: dict[int, _Progress] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self, load: Load) -> Outcome:
        """Bring a version into memory, or only measure it; the word on it, whatever happens."""
        if load.lora_id == MEASURE:
            return self._measure(load)
        started_s = time.monotonic()
        with self._lock:
            progress = self._loads.setdefault(load.lora_id, _Progress())
            progress.running = True
        try:
            if progress.prepared is None:
                progress.prepared = self.manager.prepare(Path(load.folder))
            prepared = progress.prepared
            self.manager.place(load.lora_id, prepared)
        except PoolFull:
            with self._lock:
                progress.running = False
                if progress.dropped:
                    self._close(progress)
            return Outcome(load.number, FULL)
        except Exception as error:  # a load may fail in any way; it must harm its own requests only
            self._end(load.lora_id, progress)
            return _failed(load, error)
        self._end(load.lora_id, progress)
        return Outcome(
            load.number,
            READY,
            prepared.packed.nbytes,
            time.monotonic() - started_s,
            prepared.source,
            prepared.unknown,
        )

    def _measure(self, load: Load) -> Outcome:
        started_s = time.monotonic()
        try:
            found = self.manager.measure(Path(load.folder))
        except Exception as error:  # as for a load
            return _failed(load, error)
        return Outcome(load.number, READY, found.nbytes, time.monotonic() - started_s, found.source, found.unknown)

    def drop(self, lora_id: int) -> int:
        """Drop an adapter, also one that is on its way; returns the bytes freed."""
        with self._lock:
            progress = self._loads.pop(lora_id, None)
            if progress is not None:
                progress.dropped = True
                if not progress.running:
                    self._close(progress)
        return self.manager.forget(lora_id)

    def _end(self, lora_id: int, progress: _Progress) -> None:
        """A load's last act. One that was dropped meanwhile leaves again: nobody knows of it."""
        with self._lock:
            self._loads.pop(lora_id, None)
            self._close(progress)
            dropped = progress.dropped
        if dropped:
            self.manager.forget(lora_id)

    def _close(self, progress: _Progress) -> None:
        prepared = progress.prepared
        if prepared is not None:
            with contextlib.suppress(ManyloraError, OSError):
                prepared.close()


def _failed(load: Load, error: Exception) -> Outcome:
    log.warning("adapter %s cannot be loaded: %s", load.engine_name, error)
    state = MISSING if isinstance(error, NotFound) else FAILED
    return Outcome(load.number, state, reason=reason(error, load.folder))


def _use_every_core() -> None:
    """Free the calling thread from the core that vLLM's CPU worker pins its process to: the steps run there.

    It is not nice: preempted while it holds the interpreter, it would keep the steps waiting too.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


class AdapterWorker:
    """The extension; every attribute starts with `manylora_`, as it lives in vLLM's worker object."""

    manylora_loader: Loader | None = None
    manylora_server: LoadServer | None = None

    def manylora_manager(self) -> AdapterManager:
        """This worker's adapter manager; a clear error if another plugin replaced it."""
        manager = vllm_seam.worker_lora_manager(self)
        assert isinstance(manager, AdapterManager), f"the LoRA manager is a {type(manager).__name__}, not manylora's"
        return manager

    def manylora_listen(self, folder: str) -> str:
        """Take loads from now on; the path of the socket, in `folder`. Safe to repeat."""
        if self.manylora_loader is None or self.manylora_server is None:
            # The step loop gives the interpreter away around every operation, and would get it back from a loader in
            # the midst of Python code 5 ms later only, each time.
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            manager = self.manylora_manager()
            self.manylora_loader = Loader(manager)
            path = socket_path(Path(folder), os.getpid())
            self.manylora_server = LoadServer(path, self.manylora_loader.load, _use_every_core)
            self.manylora_server.run(manager.meet_agent)
        return str(self.manylora_server.path)

    def manylora_forget(self, lora_id: int) -> int:
        """Drop an adapter, also one that is on its way; returns the bytes freed."""
        if self.manylora_loader is not None:
            return self.manylora_loader.drop(lora_id)
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
