"""What this worker's layers take, written down for whoever packs adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from manylora.kernels.pages import Module
from manylora.staging.layout import ModuleLayout, NameMap, Part, Ranges


def module_layout(module: Module, layer: Any, packed: Sequence[str]) -> ModuleLayout:
    """One layer: `module` is its geometry on this rank, `packed` the names under which adapters carry its slices."""
    parts = parts_of(module, packed)
    if not isinstance(layer, BaseLinearLayerWithLoRA):
        # Engines pad tables and heads: an adapter's may be shorter.
        return ModuleLayout(
            module.name, module.in_features, module.widths, module.is_lookup, parts, 0, (0,) * len(module.widths)
        )
    if layer.tp_size == 1:
        return ModuleLayout(
            module.name, module.in_features, module.widths, module.is_lookup, parts, module.in_features, module.widths
        )
    full_in, full_widths = int(layer.base_layer.input_size), _full_widths(layer)
    columns, rows = _shards(layer, full_in, full_widths)
    return ModuleLayout(
        module.name, module.in_features, module.widths, module.is_lookup, parts, full_in, full_widths, columns, rows
    )


def parts_of(module: Module, packed: Sequence[str]) -> tuple[Part, ...]:
    """The parts of a module. Where adapters have fewer parts than the layer slices, the first covers several."""
    slices = len(module.widths)
    if not packed or len(packed) > slices:
        return (Part(module.name, 0, slices),)
    first = slices - len(packed) + 1
    return (Part(packed[0], 0, first), *(Part(name, first + nth, 1) for nth, name in enumerate(packed[1:])))


def name_map(model: Any) -> tuple[NameMap, Callable[[str], str] | None]:
    """How a model renames a checkpoint's tensors; and a function that does so where a `NameMap` cannot say it."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return NameMap(), None
    for reduce in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, reduce):
            mapper = getattr(mapper, reduce)()
            break
    if getattr(mapper, "orig_to_new_renaming", None) or getattr(mapper, "orig_to_new_stacked", None):
        # What vLLM drops keeps its name here, is found in no layer, and is told as unknown.
        return NameMap(), lambda name: str(mapper._map_name(name) or name)
    patterns = {_pattern(pattern): new for pattern, new in getattr(mapper, "orig_to_new_regex", {}).items()}
    tables = (patterns, mapper.orig_to_new_substr, mapper.orig_to_new_prefix, mapper.orig_to_new_suffix)
    return NameMap(*(_pairs(table) for table in tables)), None


def _pattern(compiled: re.Pattern[str]) -> str:
    """A compiled pattern as text that compiles to the same."""
    letters = {re.IGNORECASE: "i", re.MULTILINE: "m", re.DOTALL: "s", re.VERBOSE: "x", re.ASCII: "a"}
    flags = "".join(letter for flag, letter in letters.items() if compiled.flags & flag)
    return f"(?{flags}){compiled.pattern}" if flags else compiled.pattern


def _pairs(table: Mapping[str, str | None]) -> tuple[tuple[str, str], ...]:
    return tuple((old, new) for old, new in table.items() if new is not None)


def _full_widths(layer: Any) -> tuple[int, ...]:
    """Rows of each slice's B over all ranks."""
    base = layer.base_layer
    if hasattr(base, "total_num_kv_heads"):  # `output_sizes` counts key and value heads once a rank
        q, kv = base.total_num_heads * base.head_size, base.total_num_kv_heads * base.head_size
        return (q, kv, kv) if layer.n_slices > 1 else (q + 2 * kv,)
    return tuple(map(int, base.output_sizes)) if layer.n_slices > 1 else (int(base.output_size),)


def _shards(layer: Any, full_in: int, full_widths: tuple[int, ...]) -> tuple[Ranges | None, tuple[Ranges, ...] | None]:
    """This rank's columns of A and rows of B, as vLLM's own layer cuts them: it is given numbers instead of weights."""
    column_numbers = torch.arange(full_in)[None, :]
    row_numbers = [torch.arange(width)[:, None] for width in full_widths]
    if layer.n_slices > 1:
        columns = layer.slice_lora_a([column_numbers] * layer.n_slices)[0]
        rows = layer.slice_lora_b(row_numbers)
    else:
        columns, rows = layer.slice_lora_a(column_numbers), [layer.slice_lora_b(row_numbers[0])]
    cut_columns = _ranges(columns.flatten())
    cut_rows = tuple(_ranges(each.flatten()) for each in rows)
    return (
        None if cut_columns == ((0, full_in),) else cut_columns,
        None if cut_rows == tuple(((0, width),) for width in full_widths) else cut_rows,
    )


def _ranges(numbers: torch.Tensor) -> Ranges:
    """Runs of consecutive numbers."""
    breaks = (torch.nonzero(numbers[1:] != numbers[:-1] + 1).flatten() + 1).tolist()
    starts, ends = [0, *breaks], [*breaks, len(numbers)]
    return tuple((int(numbers[start]), int(numbers[end - 1]) + 1) for start, end in zip(starts, ends, strict=True))
