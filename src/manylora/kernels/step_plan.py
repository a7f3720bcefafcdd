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


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the kernels read.

    `order` int32 [tokens]: token rows sorted by adapter; `groups` int32 [capacity, 4]: table, rank blocks, first
    position in `order`, tokens; `items` int32 [capacity, 8]: table, rank blocks, this rank block, first position,
    tokens, 0, 0, 0; `counts` int32 [2]: items, groups.
    """

    order: Ints
    groups: Ints
    items: Ints
    counts: Ints


def capacity(tokens: int, group_tokens: int, adapters: int, max_rank: int) -> tuple[int, int]:
    """The most groups and items that a step of `tokens` tokens can have."""
    groups = min(tokens, tokens // group_tokens + adapters)
    return groups, groups * -(-max_rank // ROWS)


def plan_step(adapters: Ints, tables: Ints, rank_blocks: Ints, group_tokens: int) -> StepPlan:
    """Plan a step.

    `adapters` int32 [tokens]: each token's adapter, negative for the base model; `tables`, `rank_blocks` int32
    [adapters]: where each adapter's table begins, and its rank blocks. A group has at most `group_tokens` tokens.
    Groups of high ranks come first: they take longest.
    """
    rows = np.flatnonzero(adapters >= 0).astype(np.int32)
    present, place, count = np.unique(adapters[rows], return_inverse=True, return_counts=True)
    by_rank = np.argsort(-rank_blocks[present], kind="stable")
    turn = np.empty_like(by_rank)
    turn[by_rank] = np.arange(len(by_rank))
    order = rows[np.argsort(turn[place], kind="stable")]
    present, count = present[by_rank], count[by_rank]

    parts = -(-count // group_tokens)
    which: Ints = np.repeat(np.arange(len(present)), parts)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = (np.cumsum(count) - count)[which] + nth * group_tokens
    tokens = np.minimum(count[which] - nth * group_tokens, group_tokens)
    groups = np.stack([tables[present][which], rank_blocks[present][which], first, tokens], axis=1).astype(np.int32)

    blocks = groups[:, 1]
    of_group: Ints = np.repeat(np.arange(len(groups)), blocks)
    block = np.arange(len(of_group)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    items: Ints = np.zeros((len(of_group), ITEM_FIELDS), np.int32)
    items[:, :2] = groups[of_group, :2]
    items[:, 2] = block
    items[:, 3:5] = groups[of_group, 2:]
    return StepPlan(order, groups, items, np.array([len(items), len(groups)], np.int32))
