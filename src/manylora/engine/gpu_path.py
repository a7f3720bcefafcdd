"""vLLM's GPU path with ours in it: the pool's kernels, and a plan for each step.

The plan lies in device buffers that never move, so that a captured CUDA graph finds the next step's plan where it found
the last one's. Only what a step needs is copied, from pinned memory on the step's own stream: nobody waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from manylora.engine.layer_calls import LayerCalls
from manylora.errors import Unavailable
from manylora.kernels.paged_lora import (
    GROUP_TOKENS,
    MAX_SLICES,
    DevicePlan,
    Tuning,
    add_lora,
    add_lora_embedding,
    padded_rank,
    sums_numel,
    tile_tokens,
)
from manylora.kernels.step_plan import COUNTS, GROUP_FIELDS, ITEM_FIELDS, StepPlan, capacity, plan_step
from manylora.kernels.stores import PagedStore

MAX_ADAPTERS = 1024
"""The most adapters in one step."""


class PlanBuffers:
    """One step's plan in device memory, for any number of tokens up to a bound."""

    def __init__(self, tokens: int, max_rank: int, device: torch.device) -> None:
        self._max_rank = max_rank
        groups, items = capacity(tokens, GROUP_TOKENS, MAX_ADAPTERS, max_rank)
        self._order = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._groups = torch.zeros(groups, GROUP_FIELDS, dtype=torch.int32, device=device)
        self._items = torch.zeros(items, ITEM_FIELDS, dtype=torch.int32, device=device)
        self._tiles = torch.zeros(tokens // GROUP_TOKENS, GROUP_FIELDS, dtype=torch.int32, device=device)
        self._counts = torch.zeros(COUNTS, dtype=torch.int32, device=device)

    def fill(self, plan: StepPlan) -> None:
        """Copy a plan in, on the current stream."""
        for target, source in (
            (self._order, plan.order),
            (self._groups, plan.groups),
            (self._items, plan.items),
            (self._tiles, plan.tiles),
            (self._counts, plan.counts),
        ):
            if len(source):
                host = torch.from_numpy(source)
                # PyTorch's cache of pinned memory keeps a block until the copy from it is done.
                pinned = host.pin_memory() if target.is_cuda else host
                target[: len(source)].copy_(pinned, non_blocking=True)

    def of(self, tokens: int) -> DevicePlan:
        """The plan as kernels for `tokens` tokens take it: how many programs they start depends on that alone."""
        groups, items = capacity(tokens, GROUP_TOKENS, MAX_ADAPTERS, self._max_rank)
        tiles = self._tiles[: tokens // GROUP_TOKENS]
        return DevicePlan(self._order, self._groups[:groups], self._items[:items], tiles, self._counts)


class PagedWrapper(LayerCalls):
    """Takes each step's token → adapter mapping, and computes through the pool."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        self._tokens = max_num_batched_tokens
        self._max_rank = int(kwargs["lora_config"].max_lora_rank)
        self._tuning = Tuning(dependent_launch=torch.cuda.get_device_capability(device)[0] >= 9)
        self._idle = self._idle_sampling = True

    def attach(self, store: PagedStore) -> None:
        """Take the store in which the adapters are; before the first step.

        Raises `Unavailable` for a model with a layer of more slices than the kernels take.
        """
        for module in store.modules:
            if len(module.widths) > MAX_SLICES:
                raise Unavailable(
                    f"{module.name} has {len(module.widths)} slices; adapters of up to {MAX_SLICES} are served"
                )
        device = store.pool.pages.device
        self._store = store
        self._plan = PlanBuffers(self._tokens, padded_rank(self._max_rank), device)
        self._sampling_plan = PlanBuffers(self._tokens, padded_rank(self._max_rank), device)
        self._sums = torch.empty(
            sums_numel(store.pool, self._tokens, self._max_rank, self._tuning), dtype=torch.float32, device=device
        )

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Take over a step's mapping: each token's and each sampled row's adapter id, 0 for the base model."""
        self._idle = self._fill(self._plan, mapping.index_mapping)
        self._idle_sampling = self._fill(self._sampling_plan, mapping.prompt_mapping)

    def _fill(self, buffers: PlanBuffers, ids: tuple[int, ...]) -> bool:
        """Plan for the adapters `ids` of rows; whether there is none."""
        of_row = np.array(ids, np.int64)
        if not of_row.any():
            return True
        present, which = np.unique(of_row, return_inverse=True)
        slots = np.array([self._store.slots.get(int(lora_id), -1) for lora_id in present], np.int32)
        lost = present[(slots < 0) & (present > 0)]
        if len(lost):
            raise RuntimeError(f"a step needs adapter {lost[0]}, which is not in the pool")
        tables, blocks = self._store.tables, self._store.rank_blocks
        buffers.fill(plan_step(slots[which], tables, blocks, GROUP_TOKENS, tile_tokens(len(ids))))
        return False

    def add_linear(self, y: torch.Tensor, x: torch.Tensor, number: int) -> None:
        if not self._idle:
            plan = self._plan.of(x.shape[0])
            add_lora(y, x, number, self._store.pool, plan, self._sums, self._max_rank, self._tuning)

    def add_embedding(self, y: torch.Tensor, ids: torch.Tensor, number: int) -> None:
        if not self._idle:
            plan = self._plan.of(ids.shape[0])
            add_lora_embedding(y, ids, number, self._store.pool, plan, self._sums, self._max_rank, self._tuning)

    def add_logits(self, y: torch.Tensor, x: torch.Tensor, number: int) -> None:
        if not self._idle_sampling and self._store.users[number]:
            plan = self._sampling_plan.of(x.shape[0])
            add_lora(y, x, number, self._store.pool, plan, self._sums, self._max_rank, self._tuning)
