"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`). Wiring only."""

from __future__ import annotations

import logging

log = logging.getLogger("manylora.engine")

CPU_PAUSE_S = 50e-6
"""Far below a step on a CPU, far above the cost of a look."""


def register() -> None:
    """Check that this vLLM fits, then put what is ours in place. vLLM may call this more than once.

    Raises `Unavailable` with one line when the vLLM is untested or has changed: serving with half of the plugin in
    place could answer with the wrong weights.
    """
    from manylora.engine.settings import EngineSettings

    settings = EngineSettings.from_env()
    from manylora.engine import vllm_internals

    vllm_internals.check(allow_untested=settings.allow_untested_vllm)
    from manylora.engine.computation import worker_manager, wrapper

    vllm_internals.install(worker_manager(settings), wrapper())
    vllm_internals.wait_without_spinning(CPU_PAUSE_S)
    vllm_internals.zero_new_kv_blocks()
    vllm_internals.rewind_seeds()
    log.info("manylora is in place in vLLM %s", vllm_internals.vllm_version())
