"""vLLM's LoRA layers and their manager, over an adapter store instead of device slots.

Beside `vllm_internals` the only file that uses private names of vLLM. vLLM gives every layer weights of the shape
[slots, 1, largest rank, …] and copies adapters into slots. Here layers are made for zero slots: they keep their
geometry and weigh nothing, and an adapter is in the store or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from vllm.lora import model_manager
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager

from manylora.engine.engine_layout import module_layout, name_map
from manylora.engine.lora_ops import marker
from manylora.errors import Unavailable
from manylora.kernels.pages import Module
from manylora.kernels.stores import AdapterStore, PagedStore
from manylora.staging.layout import EXACT, PAGES, EngineLayout
from manylora.staging.packed_form import pack_weights

MakeStore = Callable[[Sequence[Module], torch.dtype, torch.device], AdapterStore]


class PooledEmbedding(VocabParallelEmbeddingWithLoRA):
    """An embedding whose A is looked up where the store keeps it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [tokens] of token ids → [tokens, width]."""
        output: torch.Tensor = self.base_layer.forward(x)
        self.punica_wrapper.add_lora_embedding(output, x, self.lora_b_stacked)
        return output


class PooledModelManager(LRUCacheLoRAModelManager):
    """Knows an adapter exactly as long as the store holds it; vLLM's slots stay empty.

    `make_store` must be set on a subclass.
    """

    make_store: MakeStore

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        lora_config = kwargs["lora_config"]
        if lora_config.fully_sharded_loras:
            raise Unavailable("--fully-sharded-loras is not supported", "leave it out: each rank holds its own shards")
        with _layers_without_weights():
            super().__init__(*args, **kwargs)
        self._numbers = {name: number for number, name in enumerate(self.modules)}
        geometry = [_geometry(name, layer) for name, layer in self.modules.items()]
        self.store = type(self).make_store(geometry, lora_config.lora_dtype, self.device)
        self.layout, self.rename = self._layout(geometry, lora_config)
        self.empty = pack_weights(self.layout, {})
        self._mapped: tuple[Any, int] = (None, -1)
        for name, layer in self.modules.items():
            _mark(layer, marker(self._numbers[name]))
        for wrapper in set(self.punica_wrapper_mapping.values()):
            wrapper.attach(self.store)

    def _layout(self, geometry: Sequence[Module], lora_config: Any) -> tuple[EngineLayout, Callable[[str], str] | None]:
        """What adapters are to be packed for; and vLLM's renaming of modules where the layout cannot say it."""
        modules = tuple(
            module_layout(module, self.modules[module.name], self.packed_modules.get(module.name, ()))
            for module in geometry
        )
        names, rename = name_map(self.model)
        columns = self.store.pool.layout.columns if isinstance(self.store, PagedStore) else 0
        layout = EngineLayout(
            form=PAGES if columns else EXACT,
            # On a CPU products are in float32 whatever the model's numbers are.
            dtype=str(lora_config.lora_dtype).removeprefix("torch.") if columns else "float32",
            columns=columns,
            max_lora_rank=int(lora_config.max_lora_rank),
            modules=modules,
            names=names,
            skipped=tuple(getattr(self.model, "lora_skip_prefixes", None) or ()),
        )
        return layout, rename

    # ---- adapters come and go ----

    def know(self, lora_id: int) -> None:
        """Make an adapter that is in the store known to vLLM."""
        self._registered_adapters[lora_id] = LoRAModel(lora_id, 1, {})

    def _add_adapter(self, lora: LoRAModel) -> None:
        if lora.loras:
            raise NotImplementedError("adapters are loaded by manylora's own reader")
        self.store.place(lora.id, self.empty)
        self.know(lora.id)

    def activate_adapter(self, lora_id: int) -> bool:
        return False

    def deactivate_adapter(self, adapter_id: int) -> bool:
        return self.store.remove(adapter_id) > 0

    def pin_adapter(self, lora_id: int) -> bool:
        self._pin_lora_in_cpu_cache(lora_id)
        return True

    def remove_all_adapters(self) -> None:
        for lora_id in list(self._registered_adapters):
            self.store.remove(lora_id)
        super().remove_all_adapters()

    def create_dummy_lora(self, lora_id: int, rank: int, embedding_modules: dict[str, str] | None = None) -> LoRAModel:
        """For warm-up: kernels are compiled and captured for any adapter by one without weights."""
        return LoRAModel(lora_id, rank, {})

    # ---- a step ----

    def set_adapter_mapping(self, mapping: Any) -> None:
        """Tell the computation whose each token is, unless nothing has changed since the last step."""
        if self._mapped != (mapping, self.store.version):
            self._set_adapter_mapping(mapping)
            self._mapped = (mapping, self.store.version)


@contextlib.contextmanager
def _layers_without_weights() -> Iterator[None]:
    """Have the LoRA layers that are made meanwhile made for zero slots."""
    from_layer, from_logits = model_manager.from_layer, model_manager.from_layer_logits_processor

    def layer_of_none(layer: Any, max_loras: int, *args: Any, **kwargs: Any) -> Any:
        return from_layer(layer, 0, *args, **kwargs)

    def logits_of_none(layer: Any, lm_head: Any, max_loras: int, *args: Any, **kwargs: Any) -> Any:
        return from_logits(layer, lm_head, 0, *args, **kwargs)

    model_manager.from_layer, model_manager.from_layer_logits_processor = layer_of_none, logits_of_none
    try:
        yield
    finally:
        model_manager.from_layer, model_manager.from_layer_logits_processor = from_layer, from_logits


def _geometry(name: str, layer: BaseLayerWithLoRA) -> Module:
    """Shapes of a layer's factors, this rank's shards under tensor parallelism."""
    a, b = layer.lora_a_stacked, layer.lora_b_stacked
    if isinstance(layer, BaseLinearLayerWithLoRA):
        return Module(name, int(a[0].shape[-1]), tuple(int(each.shape[2]) for each in b))
    if isinstance(layer, VocabParallelEmbeddingWithLoRA):
        return Module(name, int(a.shape[1]), (int(b.shape[2]),), is_lookup=True)
    if isinstance(layer, LogitsProcessorWithLoRA):
        return Module(name, int(a.shape[-1]), (int(b.shape[2]),))
    raise Unavailable(
        f"adapters of {type(layer).__name__} ({name}) are not supported by the adapter pool",
        "mixtures of experts and classification heads are not served yet",
    )


def _mark(layer: BaseLayerWithLoRA, mark: torch.Tensor) -> None:
    """Name a layer's module to the computation, which looks at nothing else."""
    if isinstance(layer, BaseLinearLayerWithLoRA):
        layer.lora_a_stacked = layer.lora_b_stacked = (mark,)
    else:
        layer.lora_a_stacked = layer.lora_b_stacked = mark
    if isinstance(layer, VocabParallelEmbeddingWithLoRA):
        layer.__class__ = PooledEmbedding
