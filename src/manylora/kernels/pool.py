"""The adapter pool: one allocation in device memory, and the adapters that lie in its pages.

Owns pages and tables; knows nothing of who asks and when. Not thread-safe: one thread, the step loop's, changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from manylora.errors import Unavailable
from manylora.kernels.pages import ROWS, ZERO_PAGE, Layout, Place, rank_blocks

Factors = tuple[torch.Tensor, torch.Tensor]
"""A as [rank, in] and B as [out, rank] of one slice, the scale already in B."""


class PoolFull(Unavailable):
    """The pool has no room; free an adapter and try again."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An adapter in the pool."""

    table: int
    """Its first entry in the pool's table."""
    rank_blocks: int
    pages: tuple[int, ...]
    rows_bytes: int
    """Bytes of its factors at their exact ranks."""


class AdapterPool:
    """Pages `[pages, 8, columns]` of one dtype on one device, page 0 zero for ever, and the table of page numbers."""

    def __init__(self, layout: Layout, budget_bytes: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Take at most `budget_bytes` for the pages; the table adds about 0.1 %.

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
        # Absent modules cost entries but no pages, so tables may need more entries than there are pages.
        self._entries = Extents(2 * count + 16 * layout.entries_per_block)
        self.table = torch.zeros(self._entries.size, dtype=torch.int32, device=device)
        self._free = list(range(count - 1, ZERO_PAGE, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_needed(self, weights: Mapping[int, Sequence[Factors | None]]) -> int:
        """Pages that `place` would take for `weights`."""
        return sum(
            rank_blocks(a.shape[0]) * (place.in_pages + place.out_pages[slice_])
            for place, slice_, a, _ in self._parts(weights)
        )

    def place(self, weights: Mapping[int, Sequence[Factors | None]]) -> Placed:
        """Copy an adapter in: for a module's number in the layout, the factors of each slice (None: this one has none).

        Ranks may differ from slice to slice. Raises `PoolFull`, and has changed nothing then.
        """
        parts = list(self._parts(weights))
        blocks = max((rank_blocks(a.shape[0]) for _, _, a, _ in parts), default=0)
        needed = self.pages_needed(weights)
        if needed > len(self._free):
            raise PoolFull(f"the adapter needs {needed} pages, and {len(self._free)} are free")
        length = blocks * self.layout.entries_per_block
        table = self._entries.take(length)
        if table is None:
            raise PoolFull("the pool's table has no room for another adapter")
        taken = [self._free.pop() for _ in range(needed)]
        entries = torch.zeros(length, dtype=torch.int32)
        images = torch.zeros(needed, ROWS, self.layout.columns, dtype=self.pages.dtype)
        done = 0
        for place, slice_, a, b in parts:
            for rows, first, count in ((a, place.a(slice_), place.in_pages), (b.t(), place.b(slice_), 0)):
                cut = self._cut(rows, images[done:], count or place.out_pages[slice_])
                entries[first * blocks : first * blocks + cut] = torch.tensor(
                    taken[done : done + cut], dtype=torch.int32
                )
                done += cut
        device = self.pages.device
        if taken:
            self.pages.index_copy_(0, torch.tensor(taken, device=device), images.to(device))
        self.table[table : table + length] = entries.to(device)
        exact = sum((a.numel() + b.numel()) * self.pages.dtype.itemsize for _, _, a, b in parts)
        return Placed(table, blocks, tuple(taken), exact)

    def remove(self, placed: Placed) -> None:
        """Give an adapter's pages back. No step that may still run must name it."""
        self._free.extend(reversed(placed.pages))
        self._entries.give_back(placed.table, placed.rank_blocks * self.layout.entries_per_block)

    def _parts(
        self, weights: Mapping[int, Sequence[Factors | None]]
    ) -> list[tuple[Place, int, torch.Tensor, torch.Tensor]]:
        return [
            (self.layout.places[module], slice_, *factors)
            for module, slices in sorted(weights.items())
            for slice_, factors in enumerate(slices)
            if factors is not None
        ]

    def _cut(self, rows: torch.Tensor, images: torch.Tensor, pages_per_block: int) -> int:
        """Write `rows` [rank, length] into page images, block by block; how many pages that were."""
        lora_rank, length = rows.shape
        columns = self.layout.columns
        pages = rank_blocks(lora_rank) * pages_per_block
        padded = torch.zeros(rank_blocks(lora_rank) * ROWS, pages_per_block * columns, dtype=self.pages.dtype)
        padded[:lora_rank, :length] = rows
        blocks = padded.view(-1, ROWS, pages_per_block, columns).transpose(1, 2)
        images[:pages] = blocks.reshape(pages, ROWS, columns)
        return pages


class Extents:
    """Ranges of a line of `size` places, first fit, neighbours joined."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]

    def take(self, length: int) -> int | None:
        """The start of a free range of `length`, now taken; None where no single range is that long."""
        if length == 0:
            return 0
        for index, (start, room) in enumerate(self._free):
            if room >= length:
                self._free[index : index + 1] = [(start + length, room - length)] if room > length else []
                return start
        return None

    def give_back(self, start: int, length: int) -> None:
        if length == 0:
            return
        joined: list[tuple[int, int]] = []
        for begin, room in sorted([*self._free, (start, length)]):
            if joined and joined[-1][0] + joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((begin, room))
        self._free = joined
