"""One packed adapter as a block of bytes: what a packed file holds, and what lies in shared memory.

    magic  8 bytes, the header's length 4 bytes, the header (JSON), zeros up to a multiple of 4096, the payload

The payload of the paged form is the table's entries and then the pages; that of the exact form the factors one after
another. Both are where their user can read them in place.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from manylora.errors import CorruptBlob
from manylora.kernels.exact import ExactAdapter, Product, pack_exact
from manylora.kernels.packing import PackedAdapter, Weights, pack
from manylora.kernels.pages import ROWS, Layout, Module
from manylora.staging.folder import AdapterWeights
from manylora.staging.layout import PAGES, EngineLayout

Buffer: TypeAlias = Any
"""Writable bytes: a memoryview, or memory that is mapped."""

MAGIC = b"mlpack1\n"
ALIGNMENT = 4096
_LENGTH_BYTES = 4
_HEAD_BYTES = len(MAGIC) + _LENGTH_BYTES
_HASH_CHARS = 64


class PackedProduct(msgspec.Struct, frozen=True, array_like=True):
    """Where an exact product's factors lie; see `kernels.exact.Product`."""

    module: int
    ranks: int
    in_features: int
    is_lookup: bool
    parts: tuple[tuple[int, int, int, int], ...]
    """Ranks from and to, columns of y from and to."""


class PackedHeader(msgspec.Struct, frozen=True):
    """What a block says of itself."""

    digest: str
    layout: str
    payload_bytes: int
    sha256: str
    """Of the header without this and of the payload, in a file; empty in memory that was filled without one."""
    changed_modules: int
    unknown: tuple[str, ...]
    dtype: str
    columns: int = 0
    pages: int = 0
    rank_blocks: int = 0
    exact_bytes: int = 0
    modules: tuple[int, ...] = ()
    products: tuple[PackedProduct, ...] = ()


def pack_weights(layout: EngineLayout, weights: Weights) -> PackedAdapter | ExactAdapter:
    """Factors in the form that `layout` names."""
    modules = modules_of(layout)
    if layout.form == PAGES:
        return pack(Layout.of(modules, layout.columns), weights, getattr(torch, layout.dtype))
    return pack_exact(modules, weights)


def modules_of(layout: EngineLayout) -> list[Module]:
    """The layers as kernels know them."""
    return [Module(each.name, each.in_features, each.widths, each.is_lookup) for each in layout.modules]


# ---- writing ----


def header_of(
    packed: PackedAdapter | ExactAdapter, *, digest: str, layout: EngineLayout, read: AdapterWeights
) -> PackedHeader:
    """The header of a block that will hold `packed`."""
    common: dict[str, Any] = {
        "digest": digest,
        "layout": layout.key,
        "sha256": "",
        "payload_bytes": sum(each.nbytes for each in _parts(packed)),
        "changed_modules": read.modules,
        "unknown": read.unknown,
        "dtype": layout.dtype,
    }
    if isinstance(packed, PackedAdapter):
        common["payload_bytes"] = _aligned(packed.entries.nbytes) + packed.images.nbytes
        return PackedHeader(
            **common,
            columns=packed.images.shape[-1],
            pages=packed.images.shape[0],
            rank_blocks=packed.rank_blocks,
            exact_bytes=packed.exact_bytes,
            modules=tuple(packed.modules.tolist()),
        )
    products = tuple(_described(number, product) for number, product in packed.products.items())
    return PackedHeader(**common, products=products)


def _described(number: int, product: Product) -> PackedProduct:
    in_features, ranks = product.a.shape
    # A table of an adapter's may be shorter than the engine's: what counts is what is there.
    parts = tuple((rank.start, rank.stop, column.start, column.start + b.shape[1]) for rank, column, b in product.b)
    return PackedProduct(number, ranks, in_features, product.a.is_contiguous(), parts)


def block_bytes(header: PackedHeader) -> int:
    """Size of the whole block."""
    return payload_start(header) + header.payload_bytes


def packed_bytes(header: PackedHeader) -> int:
    """What the adapter in a block takes in adapter memory (`nbytes` of its view)."""
    if header.columns:
        return header.pages * ROWS * header.columns * int(getattr(torch, header.dtype).itemsize)
    return header.payload_bytes


def payload_start(header: PackedHeader) -> int:
    """Where the payload begins; the same whatever `sha256` is later set to."""
    return _aligned(_HEAD_BYTES + len(_bare(header)) + _HASH_CHARS)


def _bare(header: PackedHeader) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(header, sha256=""))


def fill(block: Buffer, header: PackedHeader, packed: PackedAdapter | ExactAdapter) -> None:
    """Write a block of `block_bytes(header)` bytes; the magic last, so that a half-written one is none."""
    at, end, view = payload_start(header), block_bytes(header), memoryview(block)
    for part in _parts(packed):
        _numbers(block, part.dtype, (part.numel(),), at).copy_(part.reshape(-1))
        at += part.nbytes
        if isinstance(packed, PackedAdapter):
            gap = min(_aligned(at), end) - at
            view[at : at + gap] = bytes(gap)  # memory may hold what another adapter left there
            at += gap
    write_head(block, header)


def write_head(block: Buffer, header: PackedHeader) -> None:
    """Write everything before the payload."""
    text = msgspec.json.encode(header)
    view = memoryview(block)
    view[len(MAGIC) : _HEAD_BYTES] = len(text).to_bytes(_LENGTH_BYTES, "little")
    view[_HEAD_BYTES : _HEAD_BYTES + len(text)] = text
    start = payload_start(header)
    view[_HEAD_BYTES + len(text) : start] = bytes(start - _HEAD_BYTES - len(text))
    view[: len(MAGIC)] = MAGIC


def _parts(packed: PackedAdapter | ExactAdapter) -> Iterable[torch.Tensor]:
    """Tensors in the payload's order."""
    if isinstance(packed, PackedAdapter):
        yield packed.entries
        yield packed.images
        return
    for product in packed.products.values():
        yield product.a if product.a.is_contiguous() else product.a.t()
        yield from (b for _, _, b in product.b)


# ---- reading ----


def copy_block(block: Buffer) -> memoryview:
    """A copy of a block in memory of its own; other threads of the interpreter go on meanwhile."""
    # Mapped, so that all of it goes back to the system with the adapter, whichever thread made the copy.
    memory = mmap.mmap(-1, len(block))
    torch.frombuffer(memory, dtype=torch.uint8).copy_(torch.frombuffer(block, dtype=torch.uint8))
    return memoryview(memory)


def read_header(block: Buffer) -> PackedHeader:
    """The header of a block, or of its beginning. Raises `CorruptBlob` where there is none."""
    view = memoryview(block)
    length = int.from_bytes(view[len(MAGIC) : _HEAD_BYTES], "little")
    if view[: len(MAGIC)] != MAGIC or _HEAD_BYTES + length > len(view):
        raise CorruptBlob("this is no packed adapter, or only the beginning of one")
    try:
        header = msgspec.json.decode(view[_HEAD_BYTES : _HEAD_BYTES + length], type=PackedHeader)
    except msgspec.MsgspecError as error:
        raise CorruptBlob(f"the header of a packed adapter cannot be read: {error}") from error
    return header


def block_digest(block: Buffer, header: PackedHeader) -> str:
    """SHA-256 (hex) of all that a block says: a number changed in the header would move an adapter's weights."""
    start = payload_start(header)
    state = hashlib.sha256(_bare(header))
    state.update(memoryview(block)[start : start + header.payload_bytes])
    return state.hexdigest()


def view_packed(block: Buffer, header: PackedHeader) -> PackedAdapter | ExactAdapter:
    """The adapter in a block, over the block's own memory. Raises `CorruptBlob` for a block that is too short."""
    if len(memoryview(block)) < block_bytes(header):
        raise CorruptBlob("a packed adapter is cut off")
    start = payload_start(header)
    if header.products or not header.columns:
        return _view_exact(block, header, start)
    entries = _numbers(block, torch.int64, (header.pages,), start)
    images = _numbers(
        block, getattr(torch, header.dtype), (header.pages, ROWS, header.columns), start + _aligned(entries.nbytes)
    )
    return PackedAdapter(images, entries, np.array(header.modules, np.int64), header.rank_blocks, header.exact_bytes)


def _view_exact(block: Buffer, header: PackedHeader, start: int) -> ExactAdapter:
    numbers = _numbers(block, torch.float32, (header.payload_bytes // 4,), start)
    products: dict[int, Product] = {}
    at = 0
    for each in header.products:
        a = numbers.as_strided(*_a_shape(each), at)
        at += a.numel()
        b = []
        for first_rank, end_rank, first, end in each.parts:
            shape = (end_rank - first_rank, end - first)
            b.append((slice(first_rank, end_rank), slice(first, end), numbers.as_strided(shape, (shape[1], 1), at)))
            at += shape[0] * shape[1]
        products[each.module] = Product(a, tuple(b))
    return ExactAdapter(products, header.payload_bytes)


def _a_shape(product: PackedProduct) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shape and strides of A as it is multiplied: [in, ranks]."""
    strides = (product.ranks, 1) if product.is_lookup else (1, product.in_features)
    return (product.in_features, product.ranks), strides


def _numbers(block: Buffer, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
    count = int(np.prod(shape))
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(block, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
