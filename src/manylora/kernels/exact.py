"""LoRA by groups of rows, each adapter at its exact ranks: the plain PyTorch path, used by the CPU engine.

    for every group (an adapter, the rows of its tokens):
        h       = x[rows] @ A.T         [n, sum of the slices' ranks]
        y[rows] += h @ B.T              B block-diagonal over the slices where it is small, else slice by slice

Rows outside every group are left as they are, which is what a base-model request in a mixed batch needs. The work is
that of the adapters in the batch, and nothing is done for a batch without adapters. Products are in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manylora.kernels.packing import Factors, Weights, check_fit
from manylora.kernels.pages import Module

_DENSE_BYTES = 256 << 10
"""Up to this size one product with zeros in it is faster than one for each slice."""

_MANY_RUNS = 4
"""From here on one gather and one scatter are faster than a product for each run of rows."""


@dataclass(frozen=True, slots=True)
class Product:
    """One module's factors, ready to be multiplied from the right."""

    a: torch.Tensor
    """[in, ranks of all slices]."""
    b: tuple[tuple[slice, slice, torch.Tensor], ...]
    """For each part: its columns of ``x A.T``, its columns of y, and B.T [ranks, width]."""


@dataclass(frozen=True, slots=True)
class ExactAdapter:
    """An adapter in host memory as it is used; by the module's number in the layout."""

    products: dict[int, Product]
    nbytes: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of one adapter in a batch."""

    adapter: ExactAdapter
    rows: torch.Tensor | slice
    """int64 [n] row numbers, or a slice where they are consecutive."""


def pack_exact(modules: Sequence[Module], weights: Weights) -> ExactAdapter:
    """Bring an adapter's factors into the form in which they are multiplied."""
    check_fit(modules, weights)
    products = {
        number: _product(modules[number], slices)
        for number, slices in weights.items()
        if any(part is not None for part in slices)
    }
    tensors = [tensor for made in products.values() for tensor in (made.a, *(part[2] for part in made.b))]
    return ExactAdapter(products, sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _product(module: Module, slices: Sequence[Factors | None]) -> Product:
    ranks = [0 if factors is None else factors[0].shape[0] for factors in slices]
    a = torch.cat([factors[0].float() for factors in slices if factors is not None]).t()
    if module.is_lookup:
        a = a.contiguous()
    rank_ends, column_ends = np.cumsum(ranks).tolist(), np.cumsum(module.widths).tolist()
    parts = [
        # A table's or head's B may end before its layer does.
        (
            slice(rank_end - rank, rank_end),
            slice(column_end - width, column_end - width + factors[1].shape[0]),
            factors[1].float().t(),
        )
        for factors, rank, rank_end, width, column_end in zip(
            slices, ranks, rank_ends, module.widths, column_ends, strict=True
        )
        if factors is not None
    ]
    if len(parts) > 1 and 4 * sum(ranks) * sum(module.widths) <= _DENSE_BYTES:
        dense = torch.zeros(sum(ranks), sum(module.widths))
        for rank_slice, columns, b in parts:
            dense[rank_slice, columns] = b
        parts = [(slice(0, sum(ranks)), slice(0, sum(module.widths)), dense)]
    return Product(a, tuple((rank_slice, columns, b.contiguous()) for rank_slice, columns, b in parts))


def row_groups(adapters: Sequence[ExactAdapter | None]) -> tuple[RowGroup, ...]:
    """The groups of a batch, from each row's adapter (None: the base model)."""
    rows: dict[int, list[int]] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            rows.setdefault(id(adapter), []).append(row)
    return tuple(RowGroup(_at(adapters, numbers[0]), part) for numbers in rows.values() for part in _in_parts(numbers))


def _at(adapters: Sequence[ExactAdapter | None], row: int) -> ExactAdapter:
    adapter = adapters[row]
    assert adapter is not None
    return adapter


def _in_parts(rows: list[int]) -> list[torch.Tensor | slice]:
    """Rows as slices where they are a few runs of consecutive ones: then reading and adding them needs no gather."""
    breaks = [at for at in range(1, len(rows)) if rows[at] != rows[at - 1] + 1]
    if len(breaks) >= _MANY_RUNS:
        return [torch.tensor(rows)]
    return [
        slice(rows[first], rows[last - 1] + 1) for first, last in zip([0, *breaks], [*breaks, len(rows)], strict=True)
    ]


def add_lora(y: torch.Tensor, x: torch.Tensor, number: int, groups: Sequence[RowGroup]) -> None:
    """``y += B A x`` in place for the rows of `groups`: `y` [tokens, sum of widths], `x` [tokens, in]."""
    for group in groups:
        product = group.adapter.products.get(number)
        if product is not None:
            _add(y, torch.mm(_rows(x, group.rows).float(), product.a), product, group.rows)


def add_lora_embedding(y: torch.Tensor, ids: torch.Tensor, number: int, groups: Sequence[RowGroup]) -> None:
    """``y += B A[:, ids]`` in place: `y` [tokens, width], `ids` [tokens]. An id that A does not have adds nothing."""
    for group in groups:
        product = group.adapter.products.get(number)
        if product is not None:
            wanted = _rows(ids, group.rows).long()
            there = (wanted >= 0) & (wanted < product.a.shape[0])
            _add(y, product.a[wanted * there] * there[:, None], product, group.rows)


def _rows(x: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _add(y: torch.Tensor, hidden: torch.Tensor, product: Product, rows: torch.Tensor | slice) -> None:
    """``y[rows] += hidden @ B.T``, with `hidden` float32 [n, ranks of all slices]."""
    for ranks, columns, b in product.b:
        part = hidden if b.shape[0] == hidden.shape[1] else hidden[:, ranks]
        if not isinstance(rows, slice):
            y[:, columns].index_add_(0, rows, torch.mm(part, b).to(y.dtype))
        elif y.dtype == torch.float32:
            y[rows, columns].addmm_(part, b)
        else:
            y[rows, columns].add_(torch.mm(part, b))
