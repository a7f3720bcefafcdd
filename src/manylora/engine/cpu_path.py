"""vLLM's CPU path with our grouped computation in it.

The original gathers dense weights for every token at the largest rank, and reads index −1 (no adapter) as the last
slot, so that a base-model request in a mixed batch gets somebody's adapter. Here rows without an adapter belong to no
group.
"""

from __future__ import annotations

from typing import Any

import torch

from manylora.engine.vllm_internals import PunicaWrapperCPU
from manylora.kernels.grouped import ExactViews, RowGroup, add_lora, add_rows, row_groups


class GroupedCPUWrapper(PunicaWrapperCPU):
    """Computes LoRA group by group; the groups of a step are found once, when its mapping is set."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self.slot_ranks: list[int] = []
        self._views = ExactViews()
        self._token_groups: tuple[RowGroup, ...] = ()
        self._sample_groups: tuple[RowGroup, ...] = ()

    def set_slot_ranks(self, lora_ranks: list[int]) -> None:
        """Ranks in use, by device slot (0 where it is free)."""
        self.slot_ranks = lora_ranks

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Take over a step's token → slot mapping."""
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        self.is_prefill = bool(mapping.is_prefill)
        self._token_groups = row_groups(self.token_lora_indices, self._ranks(len(lora_index_to_id)))
        self._sample_groups = row_groups(self.sampler_indices, self._ranks(len(lora_index_to_id)))
        self.no_lora = not self._token_groups

    def _ranks(self, slots: int) -> list[int]:
        # Warm-up activates adapters of vLLM's own before any rank was announced: their whole width counts then.
        full = torch.iinfo(torch.int32).max
        return [rank or full for rank in self.slot_ranks] + [full] * (slots - len(self.slot_ranks))

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
        """``y += x @ A.T @ B.T * scale`` for every slice; shapes as in `manylora.kernels.grouped.add_lora`."""
        add_lora(y, x, lora_a_stacked, lora_b_stacked, output_slices, self._token_groups, self._views, scale=scale)

    def add_shrink(
        self,
        y: tuple[torch.Tensor, ...] | torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """``y[i] = x @ A[i].T * scale`` into buffers of the full rank."""
        x = x.view(-1, x.shape[-1])
        for out, a in zip(y, lora_a_stacked, strict=False):
            flat = out.view(-1, out.shape[-1])
            for group in self._token_groups:
                hidden = torch.mm(x[group.rows].float(), a[group.slot].flatten(0, -2).float().t())
                flat[group.rows, : hidden.shape[1]] = (hidden * scale).to(flat.dtype)

    def add_expand(
        self,
        y: torch.Tensor,
        x: tuple[torch.Tensor, ...] | torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """``y[:, slice i] += x[i] @ B[i].T`` (or ``=`` where `add_inputs` is false)."""
        flat, offset = y.view(-1, y.shape[-1]), offset_start
        for hidden, b, width in zip(x, lora_b_stacked, output_slices, strict=False):
            for group in self._token_groups:
                update = torch.mm(hidden[group.rows].float(), b[group.slot].flatten(0, -2).float().t())
                if not add_inputs:
                    flat[group.rows, offset : offset + width] = 0
                add_rows(flat, group.rows, update, offset, width)
            offset += width

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """``y += x @ B.T``, where `x` [tokens, max_rank] holds the rows of the embedding's A."""
        self.add_expand(y, (x,), (lora_b_stacked,), (y.shape[-1],), add_inputs=add_inputs)

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
        """``y += x @ A.T @ B.T * scale`` for the rows that are sampled."""
        flat = y.view(-1, y.shape[-1])
        rows = x.view(-1, x.shape[-1])
        a, b, widths = (lora_a_stacked,), (lora_b_stacked,), (flat.shape[1],)
        add_lora(flat, rows, a, b, widths, self._sample_groups, self._views, scale=scale)
