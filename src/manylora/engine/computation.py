"""Which store and which wrapper this platform computes with."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from manylora.engine import vllm_internals
from manylora.engine.adapter_manager import AdapterManager
from manylora.engine.settings import EngineSettings
from manylora.engine.vllm_pool import PooledModelManager
from manylora.kernels.pages import Module
from manylora.kernels.stores import AdapterStore, ExactStore, PagedStore


def worker_manager(settings: EngineSettings) -> type[AdapterManager]:
    """The worker manager, over a store of the size in `settings`."""

    def store_of(modules: Sequence[Module], dtype: torch.dtype, device: torch.device) -> AdapterStore:
        size = settings.adapter_memory
        if vllm_internals.on_cpu():
            return ExactStore(modules, size.of(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
        return PagedStore(modules, size.of(torch.cuda.get_device_properties(device).total_memory), dtype, device)

    class Models(PooledModelManager):
        make_store = staticmethod(store_of)

    class Manager(AdapterManager):
        _manager_cls = Models
        agent_socket = settings.agent_socket

    return Manager


def wrapper() -> type[vllm_internals.PunicaWrapperBase]:
    """What computes LoRA for a step."""
    if vllm_internals.on_cpu():
        from manylora.engine.cpu_path import GroupedWrapper

        return GroupedWrapper
    from manylora.engine.gpu_path import PagedWrapper

    return PagedWrapper
