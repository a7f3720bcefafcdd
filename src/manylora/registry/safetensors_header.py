"""The header of a safetensors file, read with limits before any tensor is touched.

The file is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes. Every claim of the
header is checked against the file: types, shapes, sizes, and that the tensors cover the rest of the file without
overlap or gap. It knows nothing of adapters; names and shapes get their meaning in `peft_format` and `base_model`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manylora.adapter import shown
from manylora.errors import InvalidAdapter
from manylora.registry.strict_json import parse_object
from manylora.registry.untrusted_files import open_plain

LENGTH_BYTES = 8
DTYPE_BITS: Mapping[str, int] = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_NAME = re.compile(r"[\x21-\x7e]{1,512}")
_FIELDS = {"dtype", "shape", "data_offsets"}
_METADATA = "__metadata__"
_SAVE_AGAIN = "copy the file again, or save it again with safetensors"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a header may hold. The defaults fit every adapter; base models get wider ones."""

    max_file_bytes: int = 4 << 30
    max_header_bytes: int = 16 << 20
    max_tensors: int = 100_000
    max_dims: int = 4
    dtypes: frozenset[str] = frozenset({"F32", "F16", "BF16"})
    follow_links: bool = False


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its bytes are `[begin, end)` counted from the header's `data_offset`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A whole header; `tensors` in the order of their bytes."""

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    data_offset: int
    file_bytes: int


def read_header(path: Path, limits: Limits | None = None, *, name: str = "") -> Header:
    """Read and check the header of `path` (called `name`); `InvalidAdapter` says what is wrong with which tensor."""
    limits, name = limits or Limits(), name or path.name
    with open_plain(path, follow_links=limits.follow_links) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length = _header_length(file.read(LENGTH_BYTES), file_bytes, name, limits)
        text = file.read(length)
    if len(text) != length:
        raise InvalidAdapter(f"{name} ends within its header", "copy the file again")
    return parse_header(text, file_bytes, name, limits)


def parse_header(text: bytes, file_bytes: int, where: str, limits: Limits) -> Header:
    """Check a header's JSON against the size of the file that it describes."""
    if not text.startswith(b"{"):
        raise InvalidAdapter(f"{where}: the header does not start with '{{'", "the file is not in safetensors format")
    entries = parse_object(text, f"{where}: the header")
    metadata = _metadata(entries.pop(_METADATA, {}), where)
    if len(entries) > limits.max_tensors:
        raise InvalidAdapter(
            f"{where} has {len(entries)} tensors, more than the {limits.max_tensors} allowed",
            "train fewer modules, or merge the adapter and serve the result as a base model",
        )
    tensors = sorted((_tensor(name, entry, where, limits) for name, entry in entries.items()), key=_position)
    data_offset = LENGTH_BYTES + len(text)
    _check_cover(tensors, file_bytes - data_offset, where)
    return Header(tuple(tensors), metadata, data_offset, file_bytes)


def _header_length(head: bytes, file_bytes: int, where: str, limits: Limits) -> int:
    if file_bytes > limits.max_file_bytes:
        raise InvalidAdapter(
            f"{where} has {file_bytes} bytes, more than the {limits.max_file_bytes} allowed",
            "MANYLORA_MAX_ADAPTER_BYTES sets the limit",
        )
    if len(head) < LENGTH_BYTES:
        raise InvalidAdapter(f"{where} is too short to be a safetensors file", "copy the file again")
    length = int.from_bytes(head, "little")
    if length > file_bytes - LENGTH_BYTES:
        raise InvalidAdapter(
            f"{where} is cut off, or not in safetensors format: its header claims {length} bytes of {file_bytes}",
            "copy the file again, or save it again with safetensors",
        )
    if length > limits.max_header_bytes:
        raise InvalidAdapter(
            f"{where}: its header has {length} bytes, more than the {limits.max_header_bytes} allowed",
            "save it again without the metadata in its header",
        )
    return length


def _metadata(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise InvalidAdapter(f"{where}: {_METADATA} is not a map of strings", _SAVE_AGAIN)
    return value


def _tensor(name: str, entry: object, where: str, limits: Limits) -> TensorInfo:
    subject = f"{where}: tensor '{shown(name, 160)}'"
    if not _NAME.fullmatch(name):
        raise InvalidAdapter(
            f"{subject} has a name that is empty, too long or not printable ASCII",
            "save the adapter with PEFT's save_pretrained, which names tensors after their modules",
        )
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise InvalidAdapter(f"{subject} is not described by exactly dtype, shape and data_offsets", _SAVE_AGAIN)
    dtype = _dtype(entry["dtype"], subject, limits)
    shape = _naturals(entry["shape"], subject, "shape")
    if len(shape) > limits.max_dims:
        raise InvalidAdapter(
            f"{subject} has {len(shape)} dimensions, more than the {limits.max_dims} allowed",
            "only LoRA on linear layers and embeddings is served, whose tensors have two",
        )
    offsets = _naturals(entry["data_offsets"], subject, "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InvalidAdapter(f"{subject} has data_offsets that are not a begin and an end", _SAVE_AGAIN)
    if math.prod(shape) * DTYPE_BITS[dtype] != (offsets[1] - offsets[0]) * 8:
        raise InvalidAdapter(
            f"{subject}: {dtype} {list(shape)} does not take {offsets[1] - offsets[0]} bytes", _SAVE_AGAIN
        )
    return TensorInfo(name, dtype, shape, offsets[0], offsets[1])


def _dtype(value: object, subject: str, limits: Limits) -> str:
    if isinstance(value, str) and value in limits.dtypes and value in DTYPE_BITS:
        return value
    raise InvalidAdapter(
        f"{subject} has the type '{shown(str(value), 20)}'", f"save it as one of {', '.join(sorted(limits.dtypes))}"
    )


def _naturals(value: object, subject: str, field: str) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 53 for item in value):
        return tuple(value)
    raise InvalidAdapter(f"{subject}: {field} is not a list of whole numbers from 0 to 2^53", _SAVE_AGAIN)


def _position(tensor: TensorInfo) -> tuple[int, int]:
    return tensor.begin, tensor.end


def _check_cover(tensors: list[TensorInfo], data_bytes: int, where: str) -> None:
    """Every data byte must belong to exactly one tensor, so that nothing can hide in the file or be read twice."""
    reached = 0
    for tensor in tensors:
        if tensor.begin != reached:
            what = "overlaps the one before it" if tensor.begin < reached else "leaves a gap before it"
            raise InvalidAdapter(
                f"{where}: tensor '{tensor.name}' {what} (begins at {tensor.begin}, not {reached})", _SAVE_AGAIN
            )
        reached = tensor.end
    if reached > data_bytes:
        raise InvalidAdapter(
            f"{where} is cut off: its tensors end at byte {reached}, its data at {data_bytes}", "copy the file again"
        )
    if reached < data_bytes:
        raise InvalidAdapter(f"{where} has {data_bytes - reached} bytes after its last tensor", _SAVE_AGAIN)
