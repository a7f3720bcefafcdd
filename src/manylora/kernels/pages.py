"""Where the rows of an adapter lie: pages of the pool, and the table that names them. Pure; knows no device.

A page holds 8 rows of `columns` numbers. Both factors are stored by rank: block `b` of a module is its rank rows
8 b … 8 b + 7, once of A (`[8, in]`) and once of B transposed (`[8, out]`), each cut into pages along its columns. So
any page can hold rows of any module of any adapter, ranks are rounded up to 8 only, and freed pages fit everybody.

An adapter's table lists its page numbers in the order of `Layout`: module by module, first every slice's A, then every
slice's B; within one factor of one slice block by block, within a block along the columns. All modules have the same
number of blocks, so that an entry's place is plain arithmetic: one dependent load between an item of work and its
weights. Blocks that a module does not have name page 0, which is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROWS = 8
"""Rank rows in a page."""

ZERO_PAGE = 0
MAX_WASTE = 0.04
_COLUMNS = (2048, 1024, 512, 256, 128, 64)


@dataclass(frozen=True, slots=True)
class Module:
    """One linear layer as the engine has it: q, k and v in one, say, are three slices of one module."""

    name: str
    in_features: int
    widths: tuple[int, ...]
    """Output columns of each slice."""
    is_lookup: bool = False
    """An embedding: A is read by column, one for each token, rather than multiplied."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module's entries lie in a table, in units of the adapter's rank blocks."""

    first: int
    in_pages: int
    """Pages of one block of A, of each slice."""
    out_pages: tuple[int, ...]
    """Pages of one block of B, of each slice."""

    def a(self, slice_: int) -> int:
        return self.first + slice_ * self.in_pages

    def b(self, slice_: int) -> int:
        return self.first + len(self.out_pages) * self.in_pages + sum(self.out_pages[:slice_])

    @property
    def end(self) -> int:
        return self.b(len(self.out_pages))


@dataclass(frozen=True, slots=True)
class Layout:
    """How wide a page is for one model, and where each module's entries lie."""

    modules: tuple[Module, ...]
    columns: int
    places: tuple[Place, ...]

    @classmethod
    def of(cls, modules: Sequence[Module], columns: int | None = None) -> Layout:
        """The layout for `modules`; by default with the widest page that wastes at most `MAX_WASTE` of an adapter."""
        columns = columns or _columns_for(modules)
        places: list[Place] = []
        first = 0
        for module in modules:
            out_pages = tuple(_pages(width, columns) for width in module.widths)
            places.append(Place(first, _pages(module.in_features, columns), out_pages))
            first = places[-1].end
        return cls(tuple(modules), columns, tuple(places))

    @property
    def entries_per_block(self) -> int:
        """Entries of a table for each rank block of the adapter."""
        return self.places[-1].end if self.places else 0

    def waste(self) -> float:
        """The share of an adapter's pages that lies beyond its rows' ends, for an adapter of every module."""
        used = sum(len(module.widths) * module.in_features + sum(module.widths) for module in self.modules)
        held = self.entries_per_block * self.columns
        return 1 - used / held if held else 0.0


def rank_blocks(lora_rank: int) -> int:
    """Blocks of `ROWS` rank rows that hold `lora_rank` of them."""
    return _pages(lora_rank, ROWS)


def _pages(length: int, unit: int) -> int:
    return -(-length // unit)


def _columns_for(modules: Sequence[Module]) -> int:
    for columns in _COLUMNS:
        if Layout.of(modules, columns).waste() <= MAX_WASTE:
            return columns
    return _COLUMNS[-1]
