"""vLLM's CPU path with our grouped computation in it.

The original gathers dense weights for every token at the largest rank, and reads index −1 (no adapter) as the last
slot, so that a base-model request in a mixed batch gets somebody's adapter. Here rows without an adapter belong to no
group.
"""

from __future__ import annotations

from typing import Any

import torch

from manylora.engine import lora_ops
from manylora.engine.vllm_internals import PunicaWrapperBase
from manylora.kernels.exact import RowGroup, add_lora, add_lora_embedding, row_groups
from manylora.kernels.stores import ExactStore


class GroupedWrapper(PunicaWrapperBase):
    """Computes LoRA group by group; the groups of a step are found once, when its mapping is set."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        self._path = lora_ops.register_path(self)
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

    # ---- what layers call ----

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """``y += B A x`` for all slices; the layer is named by `lora_a_stacked`'s marker."""
        lora_ops.add_lora(y, x, lora_a_stacked[0], self._path)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """``y += B A[:, x]``, where `x` holds token ids; the layer is named by `lora_b_stacked`, a marker."""
        lora_ops.add_lora_embedding(y, x, lora_b_stacked, self._path)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """``y += B A x`` for the rows that are sampled."""
        rows = x.view(-1, x.shape[-1])
        add_lora(y.view(-1, y.shape[-1]), rows, int(lora_a_stacked), self._sampling_groups)

    def add_shrink(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("a layer computes shrink and expand on its own; manylora does not serve it")

    add_expand = apply_lora_full_linear = add_shrink

    # ---- behind the operators ----

    def add_linear(self, y: torch.Tensor, x: torch.Tensor, number: int) -> None:
        add_lora(y, x, number, self._groups)

    def add_embedding(self, y: torch.Tensor, ids: torch.Tensor, number: int) -> None:
        add_lora_embedding(y, ids, number, self._groups)
