"""Are all numbers of an adapter finite and of a sane size? One NaN turns every answer of the adapter into noise, and so
does a product that overflows.

A float is NaN, infinite or at least `MAX_MAGNITUDE` exactly when its exponent reaches a certain value. Masking the
exponents and adding what is missing to the next power of two carries into the sign's place for just those, and Python's
long integers do that for a whole chunk at once: about as fast as SHA-256, in bounded memory, with neither numpy nor
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

from manylora.errors import InvalidAdapter
from manylora.registry.safetensors_header import Header, TensorInfo
from manylora.registry.untrusted_files import open_plain

CHUNK_BYTES = 1 << 16
MAX_MAGNITUDE = 4096
"""Trained factors stay below 10; the engine bounds their products."""
_MAX_EXPONENT = MAX_MAGNITUDE.bit_length() - 1


@dataclass(frozen=True, slots=True)
class _Format:
    """The bits of one float type. `step` is the exponent's lowest bit, `sign` the bit above its highest."""

    width: int
    exponent: int
    step: int
    sign: int
    bias: int

    @property
    def first_refused(self) -> int:
        """The smallest exponent, in place, of a number that is refused."""
        return (self.bias + _MAX_EXPONENT) * self.step


_FORMATS = {
    "F32": _Format(4, 0x7F80_0000, 0x0080_0000, 0x8000_0000, 127),
    "F16": _Format(2, 0x7C00, 0x0400, 0x8000, 15),
    "BF16": _Format(2, 0x7F80, 0x0080, 0x8000, 127),
}


def check_finite(path: Path, header: Header, *, name: str = "") -> None:
    """Scan all tensors of a file (called `name`); `InvalidAdapter` names the first NaN, infinity or huge number."""
    with open_plain(path) as file:
        for tensor in header.tensors:
            for position, chunk in _chunks(file, header.data_offset + tensor.begin, tensor.size_bytes):
                if _any_refused(chunk, tensor.dtype):
                    raise _refusal(name or path.name, tensor, position, chunk)


def _chunks(file: BinaryIO, offset: int, size_bytes: int) -> Iterator[tuple[int, bytes]]:
    file.seek(offset)
    for position in range(0, size_bytes, CHUNK_BYTES):
        want = min(CHUNK_BYTES, size_bytes - position)
        chunk = file.read(want)
        if len(chunk) != want:
            raise InvalidAdapter("the adapter's file became shorter while it was read", "push it again")
        yield position, chunk


def _any_refused(chunk: bytes, dtype: str) -> bool:
    exponents, missing, signs = _masks(dtype)
    return bool(((int.from_bytes(chunk, "little") & exponents) + missing) & signs)


@cache
def _masks(dtype: str) -> tuple[int, int, int]:
    """The three masks of a format, repeated over a whole chunk (a shorter chunk reads as zeros beyond its end)."""
    bits = _FORMATS[dtype]

    def repeated(unit: int) -> int:
        return int.from_bytes(unit.to_bytes(bits.width, "little") * (CHUNK_BYTES // bits.width), "little")

    return repeated(bits.exponent), repeated(bits.sign - bits.first_refused), repeated(bits.sign)


def _refusal(where: str, tensor: TensorInfo, position: int, chunk: bytes) -> InvalidAdapter:
    bits = _FORMATS[tensor.dtype]
    words = (int.from_bytes(chunk[at : at + bits.width], "little") for at in range(0, len(chunk), bits.width))
    index, word = next((i, w) for i, w in enumerate(words) if w & bits.exponent >= bits.first_refused)
    if word & bits.exponent != bits.exponent:
        kind = f"a number beyond ±{MAX_MAGNITUDE}"
    else:
        kind = "a NaN" if word & (bits.step - 1) else "an infinity"
    return InvalidAdapter(
        f"{where}: tensor '{tensor.name}' holds {kind} at element {position // bits.width + index}",
        "the training diverged or overflowed its type; train again, or save in bfloat16 or float32",
    )
