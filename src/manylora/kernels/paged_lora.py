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

from manylora.kernels.paged_kernels import expand, gather, shrink
from manylora.kernels.pages import ROWS, Module, Place
from manylora.kernels.pool import AdapterPool
from manylora.kernels.prefill_kernels import expand_tiles, shrink_tiles

GROUP_TOKENS = 16
TILE_TOKENS = 64
MANY_TOKENS = 512
"""In steps of more tokens than this, adapters with more than a group of tokens are computed tile by tile."""

MAX_SLICES = 3


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A `StepPlan` in device memory, in buffers of fixed size: see there for the fields."""

    order: torch.Tensor
    groups: torch.Tensor
    items: torch.Tensor
    tiles: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes that change speed only."""

    shrink_programs: int = 528
    shrink_warps: int = 2
    shrink_width: int = 1024
    """Columns of x that several tokens take at a time in a step of at most `few_tokens`; else a whole page."""
    few_tokens: int = 64
    shrink_step: int = 512
    shrink_stages: int = 3
    expand_programs: int = 2112
    expand_warps: int = 1
    expand_tile: int = 128
    few_tile: int = 64
    """Columns that groups of several tokens take at a time in a step of at most `few_tokens`; else `expand_tile`."""
    rank_tile: int = 16
    tile_shrink_programs: int = 264
    tile_shrink_warps: int = 4
    tile_shrink_rows: int = 64
    tile_shrink_step: int = 128
    tile_shrink_stages: int = 3
    tile_expand_programs: int = 1056
    tile_expand_warps: int = 4
    tile_expand_reach: int = 512
    tile_expand_span: int = 64
    tile_expand_stages: int = 4
    dependent_launch: bool = True


def tile_tokens(tokens: int) -> int | None:
    """What `plan_step` takes for a step of `tokens` tokens."""
    return TILE_TOKENS if tokens > MANY_TOKENS else None


def sums_numel(pool: AdapterPool, tokens: int, max_rank: int, tuning: Tuning) -> int:
    """Float32 numbers that a call needs for its partial sums, whichever module it is for."""
    parts = (
        1 if module.is_lookup else _parts(pool, place, tuning) * len(place.out_pages)
        for module, place in zip(pool.layout.modules, pool.layout.places, strict=True)
    )
    return max(parts, default=0) * tokens * padded_rank(max_rank)


def _parts(pool: AdapterPool, place: Place, tuning: Tuning) -> int:
    return place.in_pages * (pool.layout.columns // min(tuning.shrink_width, pool.layout.columns))


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
    module, place = _find(pool, number)
    tokens, padded = x.shape[0], padded_rank(max_rank)
    slices = len(module.widths)
    columns = pool.layout.columns
    width = min(tuning.shrink_width if tokens <= tuning.few_tokens else columns, columns)
    parts = place.in_pages * (columns // width)
    shrinks = min(tuning.shrink_programs, plan.items.shape[0] * parts * slices)
    shrink[(shrinks,)](
        x, x.stride(0), plan.order, plan.counts, plan.items, pool.table, pool.pages, sums, place.first, tokens,
        module.in_features, place.in_pages, slices, columns, padded, GROUP_TOKENS, width,
        min(tuning.shrink_step, width), tuning.shrink_stages, tuning.dependent_launch,
        num_warps=tuning.shrink_warps, **_options(tuning),
    )  # fmt: skip
    _expand(y, number, pool, plan, sums, tokens, padded, parts, place.in_pages, tuning)
    if tile_tokens(tokens):
        _add_tiles(y, x, module, place, pool, plan, sums, padded, tuning)


def _add_tiles(
    y: torch.Tensor,
    x: torch.Tensor,
    module: Module,
    place: Place,
    pool: AdapterPool,
    plan: DevicePlan,
    sums: torch.Tensor,
    padded: int,
    tuning: Tuning,
) -> None:
    """The same for the tiles of `plan`."""
    slices, columns = len(module.widths), pool.layout.columns
    shrinks = min(tuning.tile_shrink_programs, plan.tiles.shape[0] * slices)
    shrink_tiles[(shrinks,)](
        x, x.stride(0), plan.order, plan.counts, plan.tiles, pool.table, pool.pages, _rounded(sums, pool), place.first,
        module.in_features, place.in_pages, slices, columns, padded, TILE_TOKENS,
        min(tuning.tile_shrink_step, columns), tuning.tile_shrink_rows, tuning.tile_shrink_stages,
        num_warps=tuning.tile_shrink_warps,
    )  # fmt: skip
    _expand_tiles(y, module, place, pool, plan, sums, padded, tuning)


def _expand_tiles(
    y: torch.Tensor,
    module: Module,
    place: Place,
    pool: AdapterPool,
    plan: DevicePlan,
    sums: torch.Tensor,
    padded: int,
    tuning: Tuning,
) -> None:
    columns = pool.layout.columns
    span, reach = min(tuning.tile_expand_span, columns), min(tuning.tile_expand_reach, columns)
    expands = min(tuning.tile_expand_programs, plan.tiles.shape[0] * _tiles(module, reach, columns))
    widths = (*module.widths, 0, 0)
    expand_tiles[(expands,)](
        y, y.stride(0), plan.order, plan.counts, plan.tiles, pool.table, pool.pages, _rounded(sums, pool), place.first,
        place.in_pages, len(module.widths), *widths[:MAX_SLICES], columns, padded, TILE_TOKENS, reach, span,
        all(width % span == 0 for width in module.widths), tuning.tile_expand_stages,
        num_warps=tuning.tile_expand_warps,
    )  # fmt: skip


def _rounded(sums: torch.Tensor, pool: AdapterPool) -> torch.Tensor:
    """`sums` for tiles: whole sums, which are multiplied in the weights' precision and so can be kept in it."""
    return sums.view(pool.pages.dtype)


def add_lora_embedding(
    y: torch.Tensor,
    ids: torch.Tensor,
    number: int,
    pool: AdapterPool,
    plan: DevicePlan,
    sums: torch.Tensor,
    max_rank: int,
    tuning: Tuning,
) -> None:
    """``y += B A[:, ids]`` for the tokens of `plan`, in place: `y` [tokens, width], `ids` [tokens] of any integer type.

    The rest as for `add_lora`. An id beyond the adapter's vocabulary adds nothing.
    """
    module, place = _find(pool, number)
    tokens, padded = ids.shape[0], padded_rank(max_rank)
    lists = [(plan.groups, plan.counts[1:], sums, GROUP_TOKENS)]
    if tile_tokens(tokens):
        lists.append((plan.tiles, plan.counts[2:], _rounded(sums, pool), TILE_TOKENS))
    for groups, count, into, height in lists:
        programs = min(tuning.shrink_programs, groups.shape[0])
        gather[(programs,)](
            ids, plan.order, count, groups, pool.table, pool.pages, into, place.first, module.in_features,
            place.in_pages, pool.layout.columns, padded, height, tuning.dependent_launch,
            num_warps=1, **_options(tuning),
        )  # fmt: skip
    _expand(y, number, pool, plan, sums, tokens, padded, 1, 1, tuning)
    if tile_tokens(tokens):
        _expand_tiles(y, module, place, pool, plan, sums, padded, tuning)


def _find(pool: AdapterPool, number: int) -> tuple[Module, Place]:
    module = pool.layout.modules[number]
    if len(module.widths) > MAX_SLICES:
        raise ValueError(f"{module.name} has {len(module.widths)} slices; the kernels take up to {MAX_SLICES}")
    return module, pool.layout.places[number]


def _expand(
    y: torch.Tensor,
    number: int,
    pool: AdapterPool,
    plan: DevicePlan,
    sums: torch.Tensor,
    tokens: int,
    padded: int,
    parts: int,
    pages_of_x: int,
    tuning: Tuning,
) -> None:
    module, place = pool.layout.modules[number], pool.layout.places[number]
    columns = pool.layout.columns
    expands = min(tuning.expand_programs, plan.groups.shape[0] * _tiles(module, tuning.expand_tile, columns))
    widths = (*module.widths, 0, 0)
    many_tile = tuning.few_tile if tokens <= tuning.few_tokens else tuning.expand_tile
    expand[(expands,)](
        y, y.stride(0), plan.order, plan.counts, plan.groups, pool.table, pool.pages, sums, place.first, tokens,
        place.in_pages, parts, pages_of_x, len(module.widths), *widths[:MAX_SLICES], columns, padded,
        GROUP_TOKENS, min(tuning.expand_tile, columns), min(many_tile, columns), tuning.rank_tile,
        tuning.dependent_launch,
        num_warps=tuning.expand_warps, **_options(tuning),
    )  # fmt: skip


def _options(tuning: Tuning) -> dict[str, bool]:
    return {"launch_pdl": True} if tuning.dependent_launch else {}


def _tiles(module: Module, tile: int, columns: int) -> int:
    tile = min(tile, columns)
    return sum(-(-width // tile) for width in module.widths)
