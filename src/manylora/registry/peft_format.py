"""A PEFT LoRA folder, read without running anything in it: `adapter_config.json` and `adapter_model.safetensors`.

The tensors' names are the truth about which modules are trained; the config gives ranks and scalings. Every
`lora_A` must have its `lora_B`, at the rank that the config gives to that module. Whether the modules exist in a
base model is `compatibility`'s question.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from manylora.adapter import shown
from manylora.errors import InvalidAdapter
from manylora.peft_config import CONFIG_FILE, WEIGHTS_FILE, digest_state, match_pattern
from manylora.registry.peft_config import PeftConfig, canonical_bytes, parse_config
from manylora.registry.safetensors_header import Header, Limits, TensorInfo, read_header
from manylora.registry.strict_json import parse_object
from manylora.registry.target_modules import unselected
from manylora.registry.untrusted_files import FileStamp, inside, is_folder, open_plain, stamp

MAX_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
_COPY_OF_BASE = re.compile(r"((?:.+\.)?(?:embed_tokens|lm_head))\.base_layer\.weight")
_PART = re.compile(r"(.+)\.(?:lora_([AB])\.weight|lora_embedding_([AB]))")
# Tensors that other features leave in the file: what they are, and what to do.
_FOREIGN: Mapping[str, tuple[str, str]] = {
    r"\.lora_magnitude_vector(\.weight)?$": ("belongs to DoRA", "train again with use_dora=False"),
    r"\.lora_B\.bias$": ("is a trained bias", "train again with lora_bias=False"),
    r"\.(trainable_tokens_|token_adapter\.)": ("is a trained token embedding", "train again without it"),
    r"\.modules_to_save\.": ("is a whole trained module", "train again with modules_to_save=None"),
    r"\.bias$": ("is a trained bias", "train again with bias='none'"),
    r"(^|\.)(embed_tokens|lm_head|wte|embed_in|embed_out)\.weight$": (
        "is a whole embedding",
        "where the vocabulary was not changed, save again with save_embedding_layers=False; else train with LoRA only",
    ),
    r"\.lora_[AB]\.[^.]+\.weight$": ("carries an adapter's name", "save the adapter again with save_pretrained"),
}


class ModuleKind(StrEnum):
    """How a module's two matrices are laid out in the file."""

    LINEAR = "linear"
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One adapted module: y += scaling · B·A·x, with A [lora_rank, in] and B [out, lora_rank]."""

    path: str
    """As in the base model: "model.layers.0.self_attn.q_proj"."""
    layer: int | None
    kind: ModuleKind
    lora_rank: int
    scaling: float
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """A PEFT folder that is sound in itself."""

    folder: Path
    weights: Path
    weights_stamp: FileStamp
    config: PeftConfig
    raw_config: Mapping[str, object]
    config_bytes: bytes
    header: Header
    modules: Mapping[str, LoraModule]
    base_copies: Mapping[str, TensorInfo]
    """Copies of base weights that PEFT saved along (for `lm_head` and embeddings), by module."""
    warnings: tuple[str, ...]
    """Doubts that a person may overrule."""

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return self.header.tensors

    @property
    def lora_rank(self) -> int:
        """The largest rank of any module."""
        return max(module.lora_rank for module in self.modules.values())

    @property
    def size_bytes(self) -> int:
        return len(self.config_bytes) + self.header.file_bytes


def read_peft_folder(folder: Path, *, max_bytes: int) -> PeftAdapter:
    """Read and check a PEFT folder; `InvalidAdapter` says what is wrong, where in it, and what to do."""
    if not is_folder(folder):
        raise InvalidAdapter(f"{shown(str(folder), 200)} is not a folder", "give the folder that PEFT saved")
    raw = _read_raw_config(folder)
    config = parse_config(raw)
    _refuse_pickle(folder)
    weights = inside(folder, WEIGHTS_FILE)
    weights_stamp = stamp(weights)
    header = read_header(weights, Limits(max_file_bytes=max_bytes), name=WEIGHTS_FILE)
    modules, base_copies = _modules(header, config)
    return PeftAdapter(
        folder=folder,
        weights=weights,
        weights_stamp=weights_stamp,
        config=config,
        raw_config=raw,
        config_bytes=canonical_bytes(raw),
        header=header,
        modules=modules,
        base_copies=base_copies,
        warnings=config.warnings + _selection_warnings(config, modules),
    )


def digest(config_bytes: bytes, weights: Path) -> str:
    """The identity of an adapter's content: 64 hex characters over the canonical config and the safetensors bytes."""
    found = digest_state(config_bytes)
    with open_plain(weights) as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


def _read_raw_config(folder: Path) -> dict[str, object]:
    with open_plain(inside(folder, CONFIG_FILE)) as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise InvalidAdapter(
            f"{CONFIG_FILE} is larger than {MAX_CONFIG_BYTES} bytes",
            "save the adapter again with PEFT; keep what is not its config in files of their own",
        )
    return parse_object(data, CONFIG_FILE)


def _refuse_pickle(folder: Path) -> None:
    if (folder / WEIGHTS_FILE).exists():
        return
    for name in _PICKLES:
        if (folder / name).exists():
            raise InvalidAdapter(
                f"{name} is a pickle, which can run code when it is read",
                "load the adapter with PEFT where you trust it and call save_pretrained(..., safe_serialization=True)",
            )


# --- tensors to modules ---------------------------------------------------------------------------------------------


def _modules(header: Header, config: PeftConfig) -> tuple[dict[str, LoraModule], dict[str, TensorInfo]]:
    parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    copies: dict[str, TensorInfo] = {}
    for tensor in header.tensors:
        name = _without_prefix(tensor.name)
        if match := _PART.fullmatch(name):
            parts[match[1]][_part_key(match)] = tensor
        elif copy := _COPY_OF_BASE.fullmatch(name):
            copies[copy[1]] = tensor
        else:
            raise _unknown_tensor(tensor.name)
    if not parts:
        raise InvalidAdapter(f"{WEIGHTS_FILE} holds no LoRA tensor", "save the adapter again with save_pretrained")
    _refuse_ambiguous_patterns(config, parts)
    return {path: _module(path, found, config) for path, found in sorted(parts.items())}, copies


def _without_prefix(name: str) -> str:
    if not name.startswith(_PREFIX):
        raise InvalidAdapter(
            f"{WEIGHTS_FILE}: tensor '{shown(name, 160)}' does not begin with '{_PREFIX}'",
            "save the adapter with PEFT's save_pretrained, or rename its tensors",
        )
    return name.removeprefix(_PREFIX)


def _part_key(match: re.Match[str]) -> str:
    return match[2] or f"embedding_{match[3]}"


def _unknown_tensor(name: str) -> InvalidAdapter:
    subject = f"{WEIGHTS_FILE}: tensor '{shown(name, 160)}'"
    for mark, (what, remedy) in _FOREIGN.items():
        if re.search(mark, name):
            return InvalidAdapter(f"{subject} {what}, which cannot be served", remedy)
    return InvalidAdapter(
        f"{subject} is not part of a LoRA adapter",
        "only …lora_A.weight, …lora_B.weight and …lora_embedding_A/B are served; remove it or train again",
    )


def _module(path: str, parts: Mapping[str, TensorInfo], config: PeftConfig) -> LoraModule:
    kind = ModuleKind.LINEAR if "A" in parts or "B" in parts else ModuleKind.EMBEDDING
    keys = ("A", "B") if kind is ModuleKind.LINEAR else ("embedding_A", "embedding_B")
    if set(parts) != set(keys):
        have, lack = sorted(parts), sorted(set(keys) - set(parts))
        raise InvalidAdapter(
            f"{WEIGHTS_FILE}: module '{shown(path, 160)}' has lora_{have[0]} but "
            + (f"no lora_{lack[0]}" if lack else "also the other kind"),
            "both halves are needed; save the adapter again",
        )
    a, b = parts[keys[0]], parts[keys[1]]
    _check_halves(a, b, config.rank_of(path))
    return LoraModule(path, layer_of(path), kind, a.shape[0], config.scaling_of(path), a.shape[1], b.shape[0])


def _check_halves(a: TensorInfo, b: TensorInfo, lora_rank: int) -> None:
    for tensor in (a, b):
        if len(tensor.shape) != 2 or not math.prod(tensor.shape):
            raise InvalidAdapter(
                f"{WEIGHTS_FILE}: tensor '{shown(tensor.name, 160)}' has the shape {list(tensor.shape)}",
                "two dimensions are needed; with ZeRO-3 or FSDP gather the shards before saving",
            )
    for tensor, found in ((a, a.shape[0]), (b, b.shape[1])):
        if found != lora_rank:
            raise InvalidAdapter(
                f"{WEIGHTS_FILE}: tensor '{shown(tensor.name, 160)}' has rank {found}, {CONFIG_FILE} says {lora_rank}",
                "the two files are not of one adapter, or r and rank_pattern were edited",
            )


def layer_of(path: str) -> int | None:
    """The number of the layer that a module lies in: the first number in its path."""
    return next((int(part) for part in path.split(".") if part.isdecimal() and len(part) < 7), None)


def _refuse_ambiguous_patterns(config: PeftConfig, paths: Mapping[str, object]) -> None:
    """PEFT takes the first match, and saving sorts the keys: a match that depends on the order cannot be trusted."""
    for field, patterns in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        ordered = {key: patterns[key] for key in sorted(patterns)}
        if list(ordered) == list(patterns):
            continue
        for path in paths:
            first, other = match_pattern(patterns, path), match_pattern(ordered, path)
            if first is not None and other is not None and patterns[first] != patterns[other]:
                raise InvalidAdapter(
                    f"{CONFIG_FILE}: {field} has two keys for '{shown(path)}': '{shown(first)}' and '{shown(other)}'",
                    "make the keys exclude each other; their order does not survive saving",
                )


def _selection_warnings(config: PeftConfig, modules: Mapping[str, LoraModule]) -> tuple[str, ...]:
    """Tensors that PEFT itself would leave out, because the config does not select their module."""
    outside = unselected(config, {path: module.layer for path, module in modules.items()})
    if not outside:
        return ()
    return (
        f"{len(outside)} trained modules are not selected by {CONFIG_FILE} (target_modules, layers_to_transform),"
        f" so PEFT would leave them out: {shown(outside[0])}",
    )
