"""LoRA over the adapter pool on a GPU (Triton): exact ranks, any adapters in one batch, two kernels a module.

`shrink` multiplies a group's tokens with the rows of A, page by page, into float32 partial sums; `expand` adds the sums
up, multiplies with the rows of B and adds to the output. A group is up to 16 tokens of one adapter. With one token the
work is bound by the bytes of the weights, and a page is read at once, all its loads in flight, and multiplied by plain
arithmetic; with more, tensor cores take it. Each kernel is a fixed number of programs that walk over a list of work
whose length is read on the device, so a captured CUDA graph serves whatever adapters come, and none at no cost but the
look. Partial sums are added up by their reader: no zeroing, no atomics.

With programmatic dependent launch (Hopper and later) a kernel reads its weights before it waits for the kernel whose
result it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manylora.kernels.paged_kernels import expand, shrink
from manylora.kernels.pages import ROWS, Module
from manylora.kernels.pool import AdapterPool

GROUP_TOKENS = 16
MAX_SLICES = 3


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A `StepPlan` in device memory, in buffers of fixed size: see there for the fields."""

    order: torch.Tensor
    groups: torch.Tensor
    items: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes that change speed only."""

    shrink_programs: int = 528
    shrink_warps: int = 2
    shrink_step: int = 512
    shrink_stages: int = 4
    expand_programs: int = 2112
    expand_warps: int = 1
    expand_tile: int = 128
    rank_tile: int = 16
    dependent_launch: bool = True


def sums_numel(pool: AdapterPool, tokens: int, max_rank: int) -> int:
    """Float32 numbers that `add_lora` needs for its partial sums, whichever module it is called for."""
    return (
        max((place.in_pages * len(place.out_pages) for place in pool.layout.places), default=0)
        * tokens
        * padded_rank(max_rank)
    )


def padded_rank(max_rank: int) -> int:
    return -(-max_rank // ROWS) * ROWS


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    number: int,
    pool: AdapterPool,
    plan: DevicePlan,
    sums: torch.Tensor,
    max_rank: int,
    tuning: Tuning,
) -> None:
    """``y += B A x`` for the tokens of `plan`, each with its own adapter, in place.

    `y` [tokens, sum of widths] and `x` [tokens, in], each row contiguous; `number` is the module's in the pool's
    layout; `sums` float32, at least `sums_numel`; `max_rank` bounds the rank of every adapter in the pool. Raises
    `ValueError` for a module of more than `MAX_SLICES` slices.
    """
    module, place = pool.layout.modules[number], pool.layout.places[number]
    if len(module.widths) > MAX_SLICES:
        raise ValueError(f"{module.name} has {len(module.widths)} slices; the kernels take up to {MAX_SLICES}")
    tokens, padded = x.shape[0], padded_rank(max_rank)
    columns = pool.layout.columns
    slices = len(module.widths)
    options = {"launch_pdl": True} if tuning.dependent_launch else {}
    shrinks = min(tuning.shrink_programs, plan.items.shape[0] * place.in_pages * slices)
    shrink[(shrinks,)](
        x, x.stride(0), plan.order, plan.counts, plan.items, pool.table, pool.pages, sums, place.first, tokens,
        module.in_features, place.in_pages, slices, columns, padded, shrinks, GROUP_TOKENS,
        min(tuning.shrink_step, columns), tuning.shrink_stages, tuning.dependent_launch,
        num_warps=tuning.shrink_warps, **options,
    )  # fmt: skip
    expands = min(tuning.expand_programs, plan.groups.shape[0] * _tiles(module, tuning.expand_tile, columns))
    widths = (*module.widths, 0, 0)
    expand[(expands,)](
        y, y.stride(0), plan.order, plan.counts, plan.groups, pool.table, pool.pages, sums, place.first, tokens,
        place.in_pages, slices, *widths[:MAX_SLICES], columns, padded, expands, GROUP_TOKENS,
        min(tuning.expand_tile, columns), tuning.rank_tile, tuning.dependent_launch,
        num_warps=tuning.expand_warps, **options,
    )  # fmt: skip


def _tiles(module: Module, tile: int, columns: int) -> int:
    tile = min(tile, columns)
    return sum(-(-width // tile) for width in module.widths)
