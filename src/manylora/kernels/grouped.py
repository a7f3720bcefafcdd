"""LoRA by groups of rows: the plain PyTorch path, used by the CPU engine.

    for every group g (an adapter slot s, its rank r, the rows of its tokens):
        h      = x[rows] @ A[s, 0, :r].T            [n, r]
        y[rows, offset : offset + width] += h @ B[s, 0, :, :r].T

Rows outside every group are left as they are, which is what a base-model request in a mixed batch needs. The work is
that of the adapters in the batch, each at its own rank, and nothing is done for a batch without adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of one adapter in a batch."""

    slot: int
    """First index into the stacked weights."""
    lora_rank: int
    """Rank in use; the stacked weights are zero beyond it."""
    rows: torch.Tensor | slice
    """int64 [n] row numbers, or a slice where they are consecutive."""


def row_groups(slots: torch.Tensor, lora_ranks: Sequence[int]) -> tuple[RowGroup, ...]:
    """Group rows by adapter slot.

    `slots` is int64 [tokens] on the CPU, negative where a row has no adapter; `lora_ranks[slot]` is that slot's rank.
    """
    groups = []
    for slot in torch.unique(slots).tolist():
        if slot >= 0:
            groups.append(RowGroup(slot, lora_ranks[slot], _as_slice(torch.nonzero(slots == slot).flatten())))
    return tuple(groups)


def _as_slice(rows: torch.Tensor) -> torch.Tensor | slice:
    """Consecutive rows as a slice, so that reading and adding them needs no gather."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == rows.numel() else rows


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    widths: Sequence[int],
    groups: Sequence[RowGroup],
    *,
    scale: float = 1.0,
) -> None:
    """Add every slice's LoRA product to `y` in place.

    Shapes: `x` [tokens, in], `y` [tokens, sum(widths)], `a[i]` [slots, 1, max_rank, in], `b[i]` [slots, 1, widths[i],
    max_rank]. Products are accumulated in float32 whatever the weights' dtype.
    """
    for group in groups:
        rows = x[group.rows].float()
        offset = 0
        for a_slice, b_slice, width in zip(a, b, widths, strict=True):
            weight_a = a_slice[group.slot, 0, : group.lora_rank].float()
            weight_b = b_slice[group.slot, 0, :, : group.lora_rank].float()
            hidden = torch.mm(rows, weight_a.t())
            if scale != 1.0:
                hidden *= scale
            add_rows(y, group.rows, torch.mm(hidden, weight_b.t()), offset, width)
            offset += width


def add_rows(y: torch.Tensor, rows: torch.Tensor | slice, update: torch.Tensor, offset: int, width: int) -> None:
    """``y[rows, offset : offset + width] += update`` in `y`'s dtype, with `update` float32 [n, width]."""
    target = y[:, offset : offset + width]
    if isinstance(rows, slice):
        target[rows].add_(update)
    else:
        target.index_add_(0, rows, update.to(y.dtype))
