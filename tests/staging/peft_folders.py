"""PEFT folders written by hand, and the layout of a small engine that takes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from manylora.peft_config import CONFIG_FILE, WEIGHTS_FILE, adapter_digest, canonical_config
from manylora.staging.layout import EXACT, PAGES, EngineLayout, ModuleLayout, NameMap, Part

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
LAYER = "model.layers.0"
VOCABULARY = 40

Tensors = dict[str, torch.Tensor]


def module(
    name: str,
    in_features: int,
    widths: Sequence[int],
    parts: Sequence[tuple[str, int]] = (),
    *,
    is_lookup: bool = False,
    padded: bool = False,
) -> ModuleLayout:
    """A layer on one rank; `parts` are names and how many slices each covers."""
    made, first = [], 0
    for part, count in parts or ((name, len(widths)),):
        made.append(Part(part, first, count))
        first += count
    full = tuple(0 if padded else width for width in widths)
    return ModuleLayout(name, in_features, tuple(widths), is_lookup, tuple(made), 0 if padded else in_features, full)


MODULES = (
    module(
        f"{LAYER}.self_attn.qkv_proj",
        20,
        (24, 8, 8),
        [(f"{LAYER}.self_attn.{part}_proj", 1) for part in "qkv"],
    ),
    module(f"{LAYER}.self_attn.o_proj", 24, (20,)),
    module("model.embed_tokens", 64, (20,), is_lookup=True, padded=True),
    module("lm_head", 20, (64,), padded=True),
    module(f"{LAYER}.in_proj", 20, (8, 4, 4, 6), [(f"{LAYER}.in_proj_qkv", 3), (f"{LAYER}.in_proj_z", 1)]),
    module(f"{LAYER}.mlp.gate_up_proj", 20, (300, 5000), [(f"{LAYER}.mlp.{part}_proj", 1) for part in ("gate", "up")]),
    module(f"{LAYER}.tiny", 1, (3,)),
)
QKV, OUT, EMBED, HEAD, IN_PROJ, GATE_UP, TINY = range(len(MODULES))


def layout(**changes: Any) -> EngineLayout:
    """What a small engine asks for; the exact form unless told otherwise."""
    form = changes.get("form", EXACT)
    values: dict[str, Any] = {
        "form": form,
        "dtype": "float32",
        "columns": 64 if form == PAGES else 0,
        "max_lora_rank": 512,
        "modules": MODULES,
        "names": NameMap(),
    }
    return EngineLayout(**{**values, **changes})


def factors(
    name: str, lora_rank: int, in_features: int, out: int, *, dtype: torch.dtype = torch.float32, lookup: bool = False
) -> Tensors:
    """Both tensors of a module as PEFT names them."""
    a, b = ("lora_embedding_A", "lora_embedding_B") if lookup else ("lora_A.weight", "lora_B.weight")
    return {
        f"base_model.model.{name}.{a}": (torch.randn(lora_rank, in_features) / 8).to(dtype),
        f"base_model.model.{name}.{b}": (torch.randn(out, lora_rank) / 8).to(dtype),
    }


def whole_adapter(lora_rank: int, *, dtype: torch.dtype = torch.float32) -> Tensors:
    """An adapter of every module of `MODULES`, tables as short as the vocabulary."""
    found: Tensors = {}
    for each in MODULES:
        if each.is_lookup:
            found |= factors(each.name, lora_rank, VOCABULARY, each.widths[0], dtype=dtype, lookup=True)
        elif not each.full_in_features:
            found |= factors(each.name, lora_rank, each.in_features, VOCABULARY, dtype=dtype)
        else:
            for part in each.parts:
                out = sum(each.widths[part.first : part.first + part.count])
                found |= factors(part.name, lora_rank, each.in_features, out, dtype=dtype)
    return found


def config(lora_rank: int = 8, **changes: Any) -> dict[str, Any]:
    """An adapter config; the scale is 2 unless told otherwise."""
    return {"peft_type": "LORA", "r": lora_rank, "lora_alpha": 2 * lora_rank, **changes}


def safetensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A sound safetensors file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return described(entries, data)


def described(entries: object, data: bytes) -> bytes:
    """A safetensors file with this header, whether it is true or not."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def write(folder: Path, weights: bytes | Tensors, settings: Mapping[str, Any] | bytes) -> Path:
    """A folder as PEFT saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = settings if isinstance(settings, bytes) else canonical_config(settings)
    (folder / CONFIG_FILE).write_bytes(raw)
    (folder / WEIGHTS_FILE).write_bytes(weights if isinstance(weights, bytes) else safetensors(weights))
    return folder


def publish(root: Path, tensors: bytes | Tensors, settings: Mapping[str, Any] | None = None) -> str:
    """A folder in the disk tier; its digest."""
    weights = tensors if isinstance(tensors, bytes) else safetensors(tensors)
    raw = canonical_config(config() if settings is None else settings)
    digest = adapter_digest(raw, [weights])
    write(root / digest, weights, raw)
    return digest
