"""All adapters that a worker can compute with, by id: in the pool of a GPU, or as they are multiplied on a CPU.

A store takes adapters that were packed beside the step loop, and refuses what does not fit. Its methods but `pack`
belong to the step loop's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from manylora.errors import Unavailable
from manylora.kernels.exact import ExactAdapter, pack_exact
from manylora.kernels.packing import Ints, PackedAdapter, Weights, pack
from manylora.kernels.pages import Layout, Module
from manylora.kernels.pool import AdapterPool, Placed, PoolFull

Packed = PackedAdapter | ExactAdapter


class AdapterStore(Protocol):
    """What holds a worker's adapters."""

    modules: tuple[Module, ...]
    version: int
    """Changes with every adapter that comes or goes."""

    @property
    def budget_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...

    def pack(self, weights: Weights) -> Packed:
        """An adapter in the form that `place` takes; in any thread."""

    def place(self, lora_id: int, packed: Any) -> None:
        """Take an adapter in. Raises `PoolFull`, or `Unavailable` where it can never fit; nothing has changed then."""

    def remove(self, lora_id: int) -> int:
        """Give up an adapter; returns the bytes freed (0 if it was not there)."""


class PagedStore:
    """Adapters in the pages of a pool in device memory."""

    def __init__(self, modules: Sequence[Module], budget_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.modules = tuple(modules)
        self.version = 0
        self.pool = AdapterPool(Layout.of(modules), budget_bytes, dtype, device)
        self.slots: dict[int, int] = {}
        """Where an adapter's numbers are in `tables` and `rank_blocks`."""
        self.tables: Ints = np.zeros(1024, np.int32)
        self.rank_blocks: Ints = np.zeros(1024, np.int32)
        self.users: Ints = np.zeros(len(self.modules), np.int32)
        """How many adapters change each module."""
        self._placed: dict[int, tuple[Placed, Ints]] = {}
        self._free_slots = list(range(1023, -1, -1))

    @property
    def budget_bytes(self) -> int:
        return int(self.pool.page_bytes * (self.pool.pages.shape[0] - 1))

    @property
    def used_bytes(self) -> int:
        return int(self.budget_bytes - self.pool.free_pages * self.pool.page_bytes)

    def pack(self, weights: Weights) -> PackedAdapter:
        return pack(self.pool.layout, weights, self.pool.pages.dtype, pin=self.pool.pages.is_cuda)

    def place(self, lora_id: int, packed: PackedAdapter) -> None:
        _require_room(packed.nbytes, self.budget_bytes)
        placed = self.pool.place(packed)
        slot = self._take_slot()
        self.slots[lora_id], self._placed[lora_id] = slot, (placed, packed.modules)
        self.users[packed.modules] += 1
        self.tables[slot], self.rank_blocks[slot] = placed.table, placed.rank_blocks
        self.version += 1

    def remove(self, lora_id: int) -> int:
        if lora_id not in self._placed:
            return 0
        placed, modules = self._placed.pop(lora_id)
        self.pool.remove(placed)
        self.users[modules] -= 1
        self._free_slots.append(self.slots.pop(lora_id))
        self.version += 1
        return int(len(placed.pages) * self.pool.page_bytes)

    def _take_slot(self) -> int:
        if not self._free_slots:
            size = len(self.tables)
            self.tables, self.rank_blocks = (
                np.concatenate([each, np.zeros_like(each)]) for each in (self.tables, self.rank_blocks)
            )
            self._free_slots = list(range(2 * size - 1, size - 1, -1))
        return self._free_slots.pop()


class ExactStore:
    """Adapters in host memory, as the CPU path multiplies them."""

    def __init__(self, modules: Sequence[Module], budget_bytes: int) -> None:
        self.modules = tuple(modules)
        self.version = 0
        self.adapters: dict[int, ExactAdapter] = {}
        self.budget_bytes = budget_bytes

    @property
    def used_bytes(self) -> int:
        return sum(adapter.nbytes for adapter in self.adapters.values())

    def pack(self, weights: Weights) -> ExactAdapter:
        return pack_exact(self.modules, weights)

    def place(self, lora_id: int, packed: ExactAdapter) -> None:
        _require_room(packed.nbytes, self.budget_bytes)
        free = self.budget_bytes - self.used_bytes
        if packed.nbytes > free:
            raise PoolFull(f"the adapter needs {packed.nbytes} bytes, and {free} are free")
        self.adapters[lora_id] = packed
        self.version += 1

    def remove(self, lora_id: int) -> int:
        adapter = self.adapters.pop(lora_id, None)
        self.version += adapter is not None
        return 0 if adapter is None else adapter.nbytes


def _require_room(needed: int, budget: int) -> None:
    if needed > budget:
        raise Unavailable(
            f"the adapter needs {needed} bytes, all adapter memory has {budget}", "raise --adapter-memory"
        )
