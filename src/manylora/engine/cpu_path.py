"""vLLM's CPU path with our grouped computation in it.

The original gathers dense weights for every token at the largest rank, and reads index −1 (no adapter) as the last
slot, so that a base-model request in a mixed batch gets somebody's adapter. Here rows without an adapter belong to no
group.
"""

from __future__ import annotations

from typing import Any

import torch

from manylora.engine.layer_calls import LayerCalls
from manylora.kernels.exact import RowGroup, add_lora, add_lora_embedding, row_groups
from manylora.kernels.stores import ExactStore


class GroupedWrapper(LayerCalls):
    """Computes LoRA group by group; the groups of a step are found once, when its mapping is set."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        self._groups: tuple[RowGroup, ...] = ()
        self._sampling_groups: tuple[RowGroup, ...] = ()

    def attach(self, store: ExactStore) -> None:
        """Take the store in which the adapters are; before the first step."""
        self._store = store

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Take over a step's mapping: each token's and each sampled row's adapter id, 0 for the base model."""
        self._groups = self._group(mapping.index_mapping)
        self._sampling_groups = self._group(mapping.prompt_mapping)

    def _group(self, ids: tuple[int, ...]) -> tuple[RowGroup, ...]:
        adapters = self._store.adapters
        return row_groups([adapters[int(lora_id)] if lora_id > 0 else None for lora_id in ids])

    def add_linear(self, y: torch.Tensor, x: torch.Tensor, number: int) -> None:
        add_lora(y, x, number, self._groups)

    def add_embedding(self, y: torch.Tensor, ids: torch.Tensor, number: int) -> None:
        add_lora_embedding(y, ids, number, self._groups)

    def add_logits(self, y: torch.Tensor, x: torch.Tensor, number: int) -> None:
        add_lora(y, x, number, self._sampling_groups)
