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


class ExactViews:
    """Views of stacked weights at a slot's exact rank, transposed for a product from the right.

    A layer is asked for the same few views at every step, and making them costs more than a small product. What the
    weights hold may change; where they lie may not.
    """

    def __init__(self, limit: int = 1 << 16) -> None:
        self._limit = limit
        # The key tells a layer by its first tensor, which the entry keeps: its id cannot become another's.
        self._made: dict[tuple[int, int, int], tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def of(
        self, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], slot: int, lora_rank: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For every slice A.T [in, rank] and B.T [rank, width]."""
        key = (id(a[0]), slot, lora_rank)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= self._limit:
                self._made.clear()
            views = [
                (a_slice[slot, 0, :lora_rank].t(), b_slice[slot, 0, :, :lora_rank].t())
                for a_slice, b_slice in zip(a, b, strict=True)
            ]
            found = self._made[key] = (a[0], views)
        return found[1]


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    widths: Sequence[int],
    groups: Sequence[RowGroup],
    views: ExactViews,
    *,
    scale: float = 1.0,
) -> None:
    """Add every slice's LoRA product to `y` in place.

    Shapes: `x` [tokens, in], `y` [tokens, sum(widths)], `a[i]` [slots, 1, max_rank, in], `b[i]` [slots, 1, widths[i],
    max_rank]. Products are accumulated in float32 whatever the weights' dtype.
    """
    plain = y.dtype == x.dtype == a[0].dtype == b[0].dtype == torch.float32
    for group in groups:
        rows = x[group.rows].float()
        products = views.of(a, b, group.slot, group.lora_rank)
        if plain and scale == 1.0 and isinstance(group.rows, slice):
            for target, (weight_a, weight_b) in zip(y[group.rows].split(list(widths), 1), products, strict=True):
                target.addmm_(torch.mm(rows, weight_a), weight_b)
            continue
        offset = 0
        for (weight_a, weight_b), width in zip(products, widths, strict=True):
            hidden = torch.mm(rows, weight_a.float())
            if scale != 1.0:
                hidden *= scale
            add_rows(y, group.rows, torch.mm(hidden, weight_b.float()), offset, width)
            offset += width


def add_rows(y: torch.Tensor, rows: torch.Tensor | slice, update: torch.Tensor, offset: int, width: int) -> None:
    """``y[rows, offset : offset + width] += update`` in `y`'s dtype, with `update` float32 [n, width]."""
    target = y[:, offset : offset + width]
    if isinstance(rows, slice):
        target[rows].add_(update)
    else:
        target.index_add_(0, rows, update.to(y.dtype))
