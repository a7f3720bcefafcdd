"""A PEFT folder → the factors that a worker's layers take: read once, checked against the layout, the scale in B.

Folders come from the disk tier, whose content was checked when it was published, and whose name says what the bytes
must hash to. What is checked again here is what an engine depends on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manylora.adapter import DIGEST_HEX_CHARS, shown
from manylora.errors import CorruptBlob, InvalidAdapter, NotFound
from manylora.kernels.packing import Factors, Weights
from manylora.peft_config import CONFIG_FILE, WEIGHTS_FILE, LoraScaling, digest_state
from manylora.staging.layout import EngineLayout, ModuleLayout, Part, Ranges

MAX_DELTA = 1e4
"""Bound on any entry of a module's ``scale · B · A``. Trained ones stay below 1; from about 1e19 on activations
overflow."""

_LENGTH_BYTES = 8
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PREFIX = "base_model.model."
_SUFFIXES = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
}
_TENSOR = ".lora_A.weight"
_BASE_TABLES = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
"""Copies of the base model's own weights, which PEFT saves beside an adapter of embeddings."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter's factors as one worker takes them."""

    weights: Weights
    modules: int
    """Modules that the adapter changes, in its own terms."""
    unknown: tuple[str, ...]
    """Those that this worker does not have: with pipeline parallelism another one must have them."""


def read_folder(folder: Path, layout: EngineLayout, rename: Callable[[str], str] | None = None) -> AdapterWeights:
    """Read and check an adapter. Raises `NotFound`, `CorruptBlob` or `InvalidAdapter`, saying what is wrong with what.

    `rename` gives the engine's name for a checkpoint's tensor, where the layout's own names do not.
    """
    rename = rename or layout.names
    config, data = _read_files(folder)
    pairs = _pairs(_tensors(data), folder)
    scales = _scales(config, pairs)
    wanted = {part.name: (number, part) for number, module in enumerate(layout.modules) for part in _names(module)}
    found: dict[int, list[Factors | None]] = {}
    unknown: list[str] = []
    for checkpoint_name, pair in pairs.items():
        tensor = _PREFIX + checkpoint_name + _TENSOR
        if any(tensor.startswith(prefix) or f".{prefix}" in tensor for prefix in layout.skipped):
            continue
        # Engines rename tensors, not modules: "lm_head." is to be found in the head's name.
        name = rename(checkpoint_name + _TENSOR).removesuffix(_TENSOR)
        number, part = wanted.get(name) or wanted.get(f"model.{name}") or (-1, None)
        if part is None:
            unknown.append(name)
            continue
        module = layout.modules[number]
        slices = found.setdefault(number, [None] * len(module.widths))
        place = slice(part.first, part.first + part.count)
        if any(factors is not None for factors in slices[place]):
            raise InvalidAdapter(f"{shown(name)} is there twice, under different names")
        slices[place] = _checked(name, pair, module, part, layout, scales[checkpoint_name])
    return AdapterWeights(found, len(pairs), tuple(unknown))


def _names(module: ModuleLayout) -> Sequence[Part]:
    """The names under which an adapter may carry a module: its parts', or its own for all of it."""
    return (*module.parts, Part(module.name, 0, len(module.widths)))


def _scales(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, float]:
    """The factor on each module's B·A."""
    try:
        scaling = LoraScaling.from_checked(config)
        return {module: float(scaling.scaling_of(module)) for module in modules}
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, re.error) as error:
        raise InvalidAdapter(f"{CONFIG_FILE} gives no scale: {type(error).__name__}: {error}") from error


# ---- bytes ----


def _read_files(folder: Path) -> tuple[dict[str, Any], bytearray]:
    try:
        raw = (folder / CONFIG_FILE).read_bytes()
        data = bytearray((folder / WEIGHTS_FILE).stat().st_size)
        with (folder / WEIGHTS_FILE).open("rb", buffering=0) as file:
            del data[_read_into(file, memoryview(data)) :]
        # Only the disk tier names folders by content.
        if len(folder.name) == DIGEST_HEX_CHARS and _digest(raw, data) != folder.name:
            raise CorruptBlob(f"the files of adapter {folder.name[:16]} no longer match their digest")
        config = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        if not folder.is_dir():  # deleted meanwhile, say
            raise NotFound(f"adapter {folder.name[:16]} is not on this disk") from error
        raise InvalidAdapter(f"adapter {folder.name[:16]} cannot be read: {_cause(error)}") from error
    if not isinstance(config, dict):
        raise InvalidAdapter(f"adapter {folder.name[:16]}: {CONFIG_FILE} is not a JSON object")
    return config, data


def _digest(config: bytes, weights: bytearray) -> str:
    state = digest_state(config)
    state.update(weights)
    return state.hexdigest()


def _read_into(file: Any, target: memoryview) -> int:
    """Read until `target` is full or the file ends; returns the bytes read."""
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            break
        done += count
    return done


def _cause(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)


def _tensors(data: bytearray) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, over its bytes."""
    try:
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        if start > len(data):
            raise ValueError("its header is cut off")
        header = json.loads(bytes(data[_LENGTH_BYTES:start]))
        tensors = {
            name: _tensor(data, start, entry["dtype"], entry["shape"], entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidAdapter(f"{WEIGHTS_FILE} cannot be read: {error}") from error
    return tensors


def _tensor(data: bytearray, start: int, dtype: str, shape: list[int], offsets: list[int]) -> torch.Tensor:
    count = math.prod(shape)
    if min(shape, default=0) < 0 or offsets[1] - offsets[0] != count * _DTYPES[dtype].itemsize:
        raise ValueError("a tensor's size is not that of its shape")
    if not 0 <= offsets[0] <= offsets[1] <= len(data) - start:
        raise ValueError("a tensor lies outside of the file")
    if count == 0:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    begin = start + offsets[0]
    if begin % _DTYPES[dtype].itemsize:  # PyTorch reads aligned numbers only
        piece = bytearray(data[begin : start + offsets[1]])
        return torch.frombuffer(piece, dtype=_DTYPES[dtype]).view(shape)
    return torch.frombuffer(data, dtype=_DTYPES[dtype], count=count, offset=begin).view(shape)


# ---- names and shapes ----


def _pairs(tensors: Mapping[str, torch.Tensor], folder: Path) -> dict[str, Factors]:
    """A and B of each module, by the module's name in the checkpoint."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith(_BASE_TABLES):
            continue
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
        if suffix is None:
            raise InvalidAdapter(f"adapter {folder.name[:16]}: {shown(name, 160)} is not a LoRA tensor that is served")
        module = name.removesuffix(suffix).removeprefix(_PREFIX)
        pair = found.setdefault(module, {})
        if _SUFFIXES[suffix] in pair:
            raise InvalidAdapter(f"module {shown(module, 160)} is there twice, under different names")
        pair[_SUFFIXES[suffix]] = tensor
    for module, pair in found.items():
        if len(pair) < len({"a", "b"}):
            raise InvalidAdapter(f"module {shown(module, 160)} has only one of lora_A and lora_B")
    return {module: (pair["a"], pair["b"]) for module, pair in found.items()}


def _checked(
    name: str, pair: Factors, module: ModuleLayout, part: Part, layout: EngineLayout, scale: float
) -> list[Factors]:
    """The factors of a part's slices, this rank's share, in the layout's dtype."""
    a, b = pair
    _check_ranks(name, a, b, layout.max_lora_rank)
    full_widths = module.full_widths[part.first : part.first + part.count]
    _check_shapes(name, a, b, module.full_in_features, full_widths)
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    _check_size(name, a, b, scale, dtype)
    if module.a_columns is not None:
        a = _rows(a.t(), module.a_columns).t()
    # A product with a number is computed in float32 and rounded once, whatever the tensor's own type.
    a, b = a.to(dtype), b * scale if b.dtype == dtype else (b.float() * scale).to(dtype)
    split = b.split(full_widths) if part.count > 1 else [b]
    if module.b_rows is not None:
        split = [_rows(rows, ranges) for rows, ranges in zip(split, module.b_rows[part.first :], strict=False)]
    return [(a, rows) for rows in split]


def _rows(matrix: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    return torch.cat([matrix[first:end] for first, end in ranges])


def _check_ranks(name: str, a: torch.Tensor, b: torch.Tensor, max_lora_rank: int) -> None:
    if a.dim() != 2 or b.dim() != 2:
        raise InvalidAdapter(f"{name}: lora_A and lora_B must have two dimensions")
    if a.numel() == 0 or b.numel() == 0:
        raise InvalidAdapter(f"{name}: lora_A or lora_B is empty")
    if a.shape[0] != b.shape[1]:
        raise InvalidAdapter(f"{name}: lora_A has rank {a.shape[0]}, lora_B {b.shape[1]}")
    if a.shape[0] > max_lora_rank:
        raise InvalidAdapter(
            f"{name} has rank {a.shape[0]}, this engine takes up to {max_lora_rank}",
            "start it with a larger --max-lora-rank",
        )


def _check_shapes(name: str, a: torch.Tensor, b: torch.Tensor, in_features: int, widths: Sequence[int]) -> None:
    """What is 0 is checked by those who pack: some engines have longer tables than the model."""
    if in_features and a.shape[1] != in_features:
        raise InvalidAdapter(f"{name}.lora_A has {a.shape[1]} columns, the layer {in_features}")
    if all(widths) and b.shape[0] != sum(widths):
        raise InvalidAdapter(f"{name}.lora_B has {b.shape[0]} rows, the layer {sum(widths)}")


def _check_size(name: str, a: torch.Tensor, b: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
    """Refuse weights whose product could overflow, or that `dtype` cannot hold: such an adapter can answer nothing.

    Whatever overflows all the same harms its own answers only; see `engine.vllm_internals.zero_new_kv_blocks`.
    """
    largest_a, largest_b = _largest(a), abs(scale) * _largest(b)
    bound = a.shape[0] * largest_a * largest_b
    if not bound <= MAX_DELTA:
        raise InvalidAdapter(f"{name}: its weights change the layer by up to {bound:.1e}, which overflows")
    limit = torch.finfo(dtype).max
    if not max(largest_a, largest_b) <= limit:
        raise InvalidAdapter(f"{name}: its weights reach {max(largest_a, largest_b):.1e}, {dtype} only {limit:.1e}")


def _largest(matrix: torch.Tensor) -> float:
    """The largest magnitude; NaN where there is one."""
    smallest, largest = torch.aminmax(matrix)
    return max(abs(float(smallest)), abs(float(largest)), key=lambda value: (math.isnan(value), value))
