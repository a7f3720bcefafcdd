"""What vLLM's LoRA layers call, the same on every platform: through an operator to whoever computes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from manylora.engine import lora_ops
from manylora.engine.vllm_internals import PunicaWrapperBase


class LayerCalls(PunicaWrapperBase):
    """A wrapper whose subclass computes; layers name their module by a marker in the place of stacked weights."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        self._path = lora_ops.register_path(self)

    @abstractmethod
    def add_linear(self, y: torch.Tensor, x: torch.Tensor, number: int) -> None:
        """``y += B A x`` for the step's tokens, in place: `y` [tokens, sum of widths], `x` [tokens, in]."""

    @abstractmethod
    def add_embedding(self, y: torch.Tensor, ids: torch.Tensor, number: int) -> None:
        """``y += B A[:, ids]`` for the step's tokens, in place: `y` [tokens, width], `ids` [tokens]."""

    @abstractmethod
    def add_logits(self, y: torch.Tensor, x: torch.Tensor, number: int) -> None:
        """``y += B A x`` for the rows that are sampled, in place; never in a graph."""

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: torch.Tensor | None = None,
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
        self.add_logits(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), int(lora_a_stacked))

    def add_shrink(self, *args: Any, **kwargs: Any) -> None:
        """Only layers that are refused at start call this and the like."""
        raise NotImplementedError("a layer computes shrink and expand on its own; manylora does not serve it")

    add_expand = apply_lora_full_linear = add_shrink
