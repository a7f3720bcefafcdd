"""Which work a step's adapters make: tokens in groups of one adapter, and the items that kernels take up.

Built on the host from the step's token → adapter numbers, in numpy, in O(tokens + items); the arrays have one size for
each number of tokens, so that a CUDA graph can be captured over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from manylora.kernels.pages import ROWS

Ints: TypeAlias = Any
"""A numpy array of int32."""

GROUP_FIELDS = 4
ITEM_FIELDS = 8
COUNTS = 5


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the kernels read.

    `order` int32 [tokens]: token rows sorted by adapter; `groups` int32 [capacity, 4]: table, rank blocks, first
    position in `order`, tokens; `items` int32 [capacity, 8]: table, rank blocks, this rank block, first position,
    tokens, 0, 0, 0; `tiles` int32 [capacity, 4]: as `groups`, of adapters with many tokens, which are in no group;
    `counts` int32 [5]: items, groups, tiles, and items and groups of one token, which come first.
    """

    order: Ints
    groups: Ints
    items: Ints
    tiles: Ints
    counts: Ints


def capacity(tokens: int, group_tokens: int, adapters: int, max_rank: int) -> tuple[int, int]:
    """The most groups and items that a step of `tokens` tokens can have."""
    groups = min(tokens, tokens // group_tokens + adapters)
    return groups, groups * -(-max_rank // ROWS)


def plan_step(
    adapters: Ints, tables: Ints, rank_blocks: Ints, group_tokens: int, tile_tokens: int | None = None
) -> StepPlan:
    """Plan a step.

    `adapters` int32 [tokens]: each token's adapter, negative for the base model; `tables`, `rank_blocks` int32
    [adapters]: where each adapter's table begins, and its rank blocks. A group has at most `group_tokens` tokens.
    Groups of one token come first, and within them and within the others high ranks: they take longest. With
    `tile_tokens`, adapters of more than `group_tokens` tokens are cut into tiles of that many instead.
    """
    rows = np.flatnonzero(adapters >= 0).astype(np.int32)
    present, place, count = np.unique(adapters[rows], return_inverse=True, return_counts=True)
    by_rank = np.argsort(-rank_blocks[present], kind="stable")
    turn = np.empty_like(by_rank)
    turn[by_rank] = np.arange(len(by_rank))
    order = rows[np.argsort(turn[place], kind="stable")]
    present, count = present[by_rank], count[by_rank]

    starts = np.cumsum(count) - count
    large = count > (group_tokens if tile_tokens else len(rows))
    named = np.stack([tables[present], rank_blocks[present]], axis=1)
    groups = _cut(named[~large], starts[~large], count[~large], group_tokens)
    tiles = _cut(named[large], starts[large], count[large], tile_tokens or group_tokens)

    groups = groups[np.argsort(groups[:, 3] > 1, kind="stable")]
    blocks = groups[:, 1]
    of_group: Ints = np.repeat(np.arange(len(groups)), blocks)
    block = np.arange(len(of_group)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    items: Ints = np.zeros((len(of_group), ITEM_FIELDS), np.int32)
    items[:, :2] = groups[of_group, :2]
    items[:, 2] = block
    items[:, 3:5] = groups[of_group, 2:]
    singles = [np.count_nonzero(tokens == 1) for tokens in (items[:, 4], groups[:, 3])]
    counts = np.array([len(items), len(groups), len(tiles), *singles], np.int32)
    return StepPlan(order, groups, items, tiles, counts)


def _cut(named: Ints, starts: Ints, counts: Ints, length: int) -> Ints:
    """Ranges of positions cut into parts of at most `length`: int32 [parts, 4], `named` before position and tokens."""
    parts = -(-counts // length)
    which: Ints = np.repeat(np.arange(len(counts)), parts)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = starts[which] + nth * length
    tokens = np.minimum(counts[which] - nth * length, length)
    return np.concatenate([named[which], first[:, None], tokens[:, None]], axis=1).astype(np.int32)
