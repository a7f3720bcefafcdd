"""An adapter cut into the pool's pages, in host memory: what `AdapterPool.place` copies, and nothing else.

Cutting and padding take far longer than the copy; so they happen beside the step loop, in any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from manylora.errors import InvalidAdapter
from manylora.kernels.pages import ROWS, Layout, Module, rank_blocks

Ints: TypeAlias = Any
"""A numpy array of integers."""

Factors = tuple[torch.Tensor, torch.Tensor]
"""A as [rank, in] and B as [out, rank] of one slice, the scale already in B."""

Weights = Mapping[int, Sequence[Factors | None]]
"""For a module's number in the layout, the factors of each slice (None: the adapter does not change this one)."""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """Pages and where a table names them."""

    images: torch.Tensor
    """[pages, 8, columns] in the pool's dtype."""
    entries: torch.Tensor
    """int64 [pages]: the entry of each page in the adapter's table."""
    modules: Ints
    """Numbers of the modules that the adapter changes."""
    rank_blocks: int
    exact_bytes: int
    """Bytes of the factors at their exact ranks."""

    @property
    def nbytes(self) -> int:
        return int(self.images.numel() * self.images.element_size())


def pack(layout: Layout, weights: Weights, dtype: torch.dtype, *, pin: bool = False) -> PackedAdapter:
    """Cut an adapter into pages. Ranks may differ from slice to slice; `pin` puts the pages in pinned memory."""
    check_fit(layout.modules, weights)
    parts = [
        (layout.places[number], slice_, *factors)
        for number, slices in sorted(weights.items())
        for slice_, factors in enumerate(slices)
        if factors is not None
    ]
    blocks = max((rank_blocks(a.shape[0]) for _, _, a, _ in parts), default=0)
    pages = sum(rank_blocks(a.shape[0]) * (place.in_pages + place.out_pages[slice_]) for place, slice_, a, _ in parts)
    images = torch.zeros(pages, ROWS, layout.columns, dtype=dtype, pin_memory=pin and pages > 0)
    entries: Ints = np.empty(pages, np.int64)
    done = 0
    for place, slice_, a, b in parts:
        for rows, first, count in (
            (a, place.a(slice_), place.in_pages),
            (b.t(), place.b(slice_), place.out_pages[slice_]),
        ):
            cut = rank_blocks(rows.shape[0]) * count
            _cut(rows, images[done : done + cut], count)
            entries[done : done + cut] = first * blocks + np.arange(cut)
            done += cut
    exact = sum(a.numel() + b.numel() for _, _, a, b in parts) * dtype.itemsize
    modules = [number for number, slices in sorted(weights.items()) if any(part is not None for part in slices)]
    return PackedAdapter(images, torch.from_numpy(entries), np.array(modules, np.int64), blocks, exact)


def check_fit(modules: Sequence[Module], weights: Weights) -> None:
    """Raise `InvalidAdapter` for the first factor that does not fit its module; a copy would cut it without a word."""
    for number, slices in weights.items():
        module = modules[number]
        if len(slices) != len(module.widths):
            raise InvalidAdapter(f"{module.name} has {len(module.widths)} slices, the adapter {len(slices)}")
        for factors, width in zip(slices, module.widths, strict=True):
            if factors is None:
                continue
            a, b = factors
            if a.shape[0] != b.shape[1]:
                raise InvalidAdapter(f"{module.name}: lora_A has rank {a.shape[0]}, lora_B {b.shape[1]}")
            if a.shape[1] > module.in_features or b.shape[0] > width:
                raise InvalidAdapter(
                    f"{module.name} takes lora_A of {module.in_features} columns and lora_B of {width} rows, "
                    f"the adapter has {a.shape[1]} and {b.shape[0]}"
                )


def _cut(rows: torch.Tensor, images: torch.Tensor, pages_per_block: int) -> None:
    """Write `rows` [rank, length] into zeroed page images, block by block, within a block along the columns."""
    lora_rank, length = rows.shape
    columns = images.shape[-1]
    blocks = images.view(-1, pages_per_block, ROWS, columns)
    whole = lora_rank // ROWS
    for page in range(pages_per_block):
        part = rows[:, page * columns : min(length, (page + 1) * columns)]
        width = part.shape[1]
        blocks[:whole, page, :, :width] = part[: whole * ROWS].reshape(whole, ROWS, width)
        if lora_rank % ROWS:
            blocks[whole, page, : lora_rank % ROWS, :width] = part[whole * ROWS :]
