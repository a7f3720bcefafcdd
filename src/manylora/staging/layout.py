"""What one worker of an engine wants an adapter to look like: a record that it sends to whoever packs for it."""

from __future__ import annotations

import hashlib
import re

import msgspec

PAGES, EXACT = "pages", "exact"
"""Forms: pages of a GPU's pool, or factors as a CPU multiplies them."""


Ranges = tuple[tuple[int, int], ...]
"""Rows or columns, from and to."""


class Part(msgspec.Struct, frozen=True):
    """Consecutive slices of a module that an adapter carries under one name."""

    name: str
    first: int
    count: int


class ModuleLayout(msgspec.Struct, frozen=True):
    """One layer of the engine, as this worker holds it."""

    name: str
    in_features: int
    widths: tuple[int, ...]
    """Output columns of each slice; q, k and v in one layer are three."""
    is_lookup: bool
    """An embedding."""
    parts: tuple[Part, ...]
    full_in_features: int
    """Columns that an adapter's A must have, over all ranks of tensor parallelism; 0: at most `in_features`."""
    full_widths: tuple[int, ...]
    """Rows that an adapter's B must have for each slice; 0: at most the slice's width."""
    a_columns: Ranges | None = None
    """This rank's columns of A; None: all."""
    b_rows: tuple[Ranges, ...] | None = None
    """This rank's rows of each slice's B; None: all."""


class NameMap(msgspec.Struct, frozen=True):
    """How the engine renames tensors of a checkpoint: what stands in a name, and what to put in its place."""

    patterns: tuple[tuple[str, str], ...] = ()
    """Regular expressions; the rest are plain text."""
    substrings: tuple[tuple[str, str], ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    suffixes: tuple[tuple[str, str], ...] = ()

    def __call__(self, name: str) -> str:
        """The engine's name for a tensor that a checkpoint calls `name`."""
        for pattern, new in self.patterns:
            name = re.sub(pattern, new, name)
        for old, new in self.substrings:
            name = name.replace(old, new, 1)
        for old, new in self.prefixes:
            if name.startswith(old):
                name = name.replace(old, new, 1)
        for old, new in self.suffixes:
            if name.endswith(old):
                name = new.join(name.rsplit(old, 1))
        return name


class EngineLayout(msgspec.Struct, frozen=True):
    """Everything that the packed form of an adapter depends on, except the adapter."""

    form: str
    dtype: str
    """Of the packed numbers, by PyTorch's name without its prefix: "bfloat16", say."""
    columns: int
    """Of a page; 0 for the exact form."""
    max_lora_rank: int
    modules: tuple[ModuleLayout, ...]
    names: NameMap
    skipped: tuple[str, ...] = ()
    """Prefixes of modules that the engine has no use for, by its own account."""

    @property
    def key(self) -> str:
        """32 hex characters that name this layout."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]
