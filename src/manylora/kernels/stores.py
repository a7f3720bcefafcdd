"""All adapters that a worker can compute with, by id: in the pool of a GPU, or as they are multiplied on a CPU.

A store takes adapters that were packed elsewhere, and refuses what does not fit. `place` runs in any thread, beside
the steps: an adapter is there for them once all of it is. `remove` belongs to the step loop's thread.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from manylora.errors import Unavailable
from manylora.kernels.exact import ExactAdapter
from manylora.kernels.packing import Ints, PackedAdapter
from manylora.kernels.pages import Layout, Module
from manylora.kernels.pool import PINNED_PIECE_BYTES, AdapterPool, Placed, PoolFull

log = logging.getLogger(__name__)

Packed = PackedAdapter | ExactAdapter

_PIN_PAUSE_S = 0.002


class AdapterStore(Protocol):
    """What holds a worker's adapters."""

    modules: tuple[Module, ...]
    version: int
    """Changes with every adapter that comes or goes."""

    @property
    def budget_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...

    def place(self, lora_id: int, packed: Any) -> None:
        """Take an adapter in. Raises `PoolFull`, or `Unavailable` where it can never fit; nothing has changed then."""

    def remove(self, lora_id: int) -> int:
        """Give up an adapter; returns the bytes freed (0 if it was not there)."""

    def pin(self, memory: mmap.mmap) -> None:
        """Have copies from `memory`, which lies in this process, made as fast as they can be; returns at once."""


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
        self._lock, self._filling = threading.Lock(), threading.Lock()
        self._copies = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
        self._removed: torch.cuda.Event | None = None
        self._pinned = PinnedMemory(self._filling, torch.device(device))

    @property
    def budget_bytes(self) -> int:
        return int(self.pool.page_bytes * (self.pool.pages.shape[0] - 1))

    @property
    def used_bytes(self) -> int:
        return int(self.budget_bytes - self.pool.free_pages * self.pool.page_bytes)

    def place(self, lora_id: int, packed: PackedAdapter) -> None:
        _require_room(packed.nbytes, self.budget_bytes)
        with self._lock:
            placed = self.pool.reserve(packed)
        try:
            self._fill(placed, packed)
        except BaseException:
            with self._lock:
                self.pool.remove(placed)
            raise
        with self._lock:
            slot = self._take_slot()
            self.tables[slot], self.rank_blocks[slot] = placed.table, placed.rank_blocks
            self.users[packed.modules] += 1
            self.slots[lora_id], self._placed[lora_id] = slot, (placed, packed.modules)
            self.version += 1

    def _fill(self, placed: Placed, packed: PackedAdapter) -> None:
        """Copy beside the steps, and return once all of it is there."""
        if self._copies is None:
            self.pool.fill(placed, packed)
            return
        with self._filling, torch.cuda.stream(self._copies):
            if self._removed is not None:
                self._copies.wait_event(self._removed)
            self.pool.fill(placed, packed)
            done = torch.cuda.Event()
            done.record()
            done.synchronize()

    def remove(self, lora_id: int) -> int:
        with self._lock:
            if lora_id not in self._placed:
                return 0
            placed, modules = self._placed.pop(lora_id)
            if self._copies is not None:
                # Steps that were begun read these pages to the end of what this stream has to do now.
                self._removed = torch.cuda.Event()
                self._removed.record()
            self.pool.remove(placed)
            self.users[modules] -= 1
            self._free_slots.append(self.slots.pop(lora_id))
            self.version += 1
            return int(len(placed.pages) * self.pool.page_bytes)

    def pin(self, memory: mmap.mmap) -> None:
        if self._copies is not None:
            threading.Thread(target=self._pinned.take, args=(memory,), name="manylora-pin", daemon=True).start()

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
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return sum(adapter.nbytes for adapter in self.adapters.values())

    def place(self, lora_id: int, packed: ExactAdapter) -> None:
        _require_room(packed.nbytes, self.budget_bytes)
        with self._lock:
            free = self.budget_bytes - self.used_bytes
            if packed.nbytes > free:
                raise PoolFull(f"the adapter needs {packed.nbytes} bytes, and {free} are free")
            self.adapters[lora_id] = packed
            self.version += 1

    def pin(self, memory: mmap.mmap) -> None:
        """Nothing copies to a device here."""

    def remove(self, lora_id: int) -> int:
        with self._lock:
            adapter = self.adapters.pop(lora_id, None)
            self.version += adapter is not None
            return 0 if adapter is None else adapter.nbytes


class PinnedMemory:
    """Memory from which a device copies by itself: one mapping at a time, the last that was given.

    In pieces, with pauses: the driver serves nobody else meanwhile. What cannot be pinned (a limit of the system's,
    say) is copied from all the same, more slowly.
    """

    def __init__(self, copying: threading.Lock, device: torch.device) -> None:
        """`copying` is held while anybody copies."""
        self._copying, self._device = copying, device
        self._pieces: list[int] = []
        self._memory: mmap.mmap | None = None
        self._turn = threading.Lock()

    def take(self, memory: mmap.mmap) -> None:
        """Let go of the mapping before, and pin this one; returns when that is done."""
        with self._turn:
            self._let_go()
            self._memory = memory
            address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            end = address + len(memory)
            while address < end:
                piece_end = min(end, address - address % PINNED_PIECE_BYTES + PINNED_PIECE_BYTES)
                with torch.cuda.device(self._device):
                    error = int(torch.cuda.cudart().cudaHostRegister(address, piece_end - address, 0))
                if error:
                    log.warning("%d of %d bytes of host memory cannot be pinned", end - address, len(memory))
                    return
                self._pieces.append(address)
                address = piece_end
                time.sleep(_PIN_PAUSE_S)
        log.info("%d bytes of host memory are pinned", len(memory))

    def _let_go(self) -> None:
        """A copy that is under way may read the old memory: it ends first."""
        with self._copying:
            with torch.cuda.device(self._device):
                for address in self._pieces:
                    torch.cuda.cudart().cudaHostUnregister(address)
            self._pieces.clear()
            self._memory = None


def _require_room(needed: int, budget: int) -> None:
    if needed > budget:
        raise Unavailable(
            f"the adapter needs {needed} bytes, all adapter memory has {budget}", "raise --adapter-memory"
        )
