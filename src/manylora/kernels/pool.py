"""The adapter pool: one allocation in device memory, and the adapters that lie in its pages.

Owns pages and tables; knows nothing of who asks and when. Not thread-safe, but for `fill`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manylora.errors import Unavailable
from manylora.kernels.extents import Extents
from manylora.kernels.packing import PackedAdapter
from manylora.kernels.pages import ROWS, ZERO_PAGE, Layout

PINNED_PIECE_BYTES = 16 << 20
"""Host memory that devices copy from is pinned in pieces that begin at multiples of this address."""

_COPY_BYTES = 32 << 20
"""How much of an adapter is on its way to the device at a time: it lies there twice meanwhile."""


class PoolFull(Unavailable):
    """The pool has no room; free an adapter and try again."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An adapter in the pool."""

    table: int
    """Its first entry in the pool's table."""
    rank_blocks: int
    pages: tuple[int, ...]


class AdapterPool:
    """Pages `[pages, 8, columns]` of one dtype on one device, page 0 zero for ever, and the table of page numbers."""

    def __init__(self, layout: Layout, budget_bytes: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Take at most `budget_bytes` for the pages; the table adds about 1 %.

        Raises `Unavailable` where the budget holds not even one rank block of every module.
        """
        self.layout = layout
        page_bytes = ROWS * layout.columns * dtype.itemsize
        count = budget_bytes // page_bytes
        if count <= layout.entries_per_block:
            needed = (layout.entries_per_block + 1) * page_bytes
            raise Unavailable(
                f"an adapter pool of {budget_bytes} bytes holds no adapter of rank {ROWS}",
                f"give it {needed} bytes or more (--adapter-memory)",
            )
        self.page_bytes = page_bytes
        self.pages = torch.empty(count, ROWS, layout.columns, dtype=dtype, device=device)
        self.pages[ZERO_PAGE].zero_()
        # Modules that an adapter does not change cost it entries and no pages: with q and v alone a model of four
        # linears takes six entries a page. About 1 % of the pages' bytes goes to the table.
        entries_per_page = max(2, min(16, page_bytes // (100 * torch.int32.itemsize)))
        self._entries = Extents(entries_per_page * count + 16 * layout.entries_per_block)
        self.table = torch.zeros(self._entries.size, dtype=torch.int32, device=device)
        self._free = list(range(count - 1, ZERO_PAGE, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def place(self, packed: PackedAdapter) -> Placed:
        """Reserve and fill on the current stream. Raises `PoolFull`, and has changed nothing then."""
        placed = self.reserve(packed)
        self.fill(placed, packed)
        return placed

    def reserve(self, packed: PackedAdapter) -> Placed:
        """Pages and a table for an adapter, without content yet. Raises `PoolFull`, and has changed nothing then."""
        needed = packed.images.shape[0]
        if needed == 0:
            return Placed(0, 0, ())
        if needed > len(self._free):
            raise PoolFull(f"the adapter needs {needed} pages, and {len(self._free)} are free")
        length = packed.rank_blocks * self.layout.entries_per_block
        if length > self._entries.size:
            raise Unavailable(
                f"the adapter's rank needs {length} entries of the pool's table, which has {self._entries.size}",
                "raise --adapter-memory",
            )
        table = self._entries.take(length)
        if table is None:
            raise PoolFull("the pool's table has no room for another adapter")
        return Placed(table, packed.rank_blocks, tuple(self._free.pop() for _ in range(needed)))

    def fill(self, placed: Placed, packed: PackedAdapter) -> None:
        """Copy an adapter into what was reserved for it, on the current stream; in any thread.

        No step that may still run on another stream must name these pages: whoever freed them sees to that.
        """
        if not placed.pages:
            return
        taken = torch.tensor(placed.pages, dtype=torch.int64)
        entries = torch.zeros(placed.rank_blocks * self.layout.entries_per_block, dtype=torch.int32)
        entries[packed.entries] = taken.to(torch.int32)
        device = self.pages.device
        index = taken.to(device)
        chunk = max(1, _COPY_BYTES // self.page_bytes)
        for first in range(0, len(placed.pages), chunk):
            images = packed.images[first : first + chunk]
            arrived = torch.empty(images.shape, dtype=images.dtype, device=device)
            copy_in_pieces(arrived, images)
            self.pages.index_copy_(0, index[first : first + chunk], arrived)
        self.table[placed.table : placed.table + len(entries)] = entries.to(device)

    def remove(self, placed: Placed) -> None:
        """Give an adapter's pages back. No step that may still run must name it."""
        self._free.extend(reversed(placed.pages))
        self._entries.give_back(placed.table, placed.rank_blocks * self.layout.entries_per_block)


def copy_in_pieces(target: torch.Tensor, source: torch.Tensor, piece_bytes: int = PINNED_PIECE_BYTES) -> None:
    """Copy host memory, on the current stream, without crossing an address that is a multiple of `piece_bytes`.

    Memory is pinned in such pieces, and CUDA refuses a copy that reaches from one pinned range into another. Both
    tensors are contiguous and of one size.
    """
    into, out_of = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
    address, first, size = source.data_ptr(), 0, out_of.numel()
    while first < size:
        end = min(size, first + piece_bytes - (address + first) % piece_bytes)
        into[first:end].copy_(out_of[first:end], non_blocking=True)
        first = end
