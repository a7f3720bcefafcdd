"""What a PEFT LoRA config says of each module's rank and scale, and how an adapter's digest is computed.

Shared by the side that checks adapters and the side that serves them, so that both read a config in the same way. Pure
functions over parsed JSON and bytes; reading files, limits and refusals belong to the callers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
KEY_PREFIX = "base_model.model."

_DIGEST_DOMAIN = b"manylora/adapter/1\n"


def canonical_config(config: Mapping[str, Any]) -> bytes:
    """The config's one spelling: JSON with sorted keys, no spaces, and `target_modules` lists in order."""
    spelt = dict(config)
    targets = spelt.get("target_modules")
    if isinstance(targets, list) and all(isinstance(name, str) for name in targets):
        spelt["target_modules"] = sorted(targets)
    return json.dumps(spelt, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def adapter_digest(config: bytes, tensors: Iterable[bytes]) -> str:
    """SHA-256 (64 hex) over a domain tag, the length of `config` (8 bytes, little endian), `config` and the tensors
    file.

    `config` is the output of `canonical_config`; `tensors` yields the safetensors file from start to end.
    """
    state = hashlib.sha256(_DIGEST_DOMAIN)
    state.update(len(config).to_bytes(8, "little"))
    state.update(config)
    for chunk in tensors:
        state.update(chunk)
    return state.hexdigest()


@dataclass(frozen=True, slots=True)
class LoraScaling:
    """Rank and scale of every module by the rules of PEFT (`peft.utils.other.get_pattern_key`,
    `LoraLayer.update_layer`).

    A pattern's key matches a module whose dotted name ends with it at a dot, or that it matches as a regular expression
    up to the end; the first key in the config's order wins. The scale is ``alpha / r``, or ``alpha / sqrt(r)`` with
    rsLoRA.
    """

    lora_rank: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LoraScaling:
        """Read the fields from a config that was checked before; a missing optional field has PEFT's default."""
        return cls(
            lora_rank=config["r"],
            lora_alpha=config["lora_alpha"],
            use_rslora=bool(config.get("use_rslora")),
            rank_pattern=config.get("rank_pattern") or {},
            alpha_pattern=config.get("alpha_pattern") or {},
        )

    def rank_of(self, module: str) -> int:
        """LoRA rank of `module`, its dotted name without the `base_model.model.` prefix."""
        key = _matching_key(self.rank_pattern, module)
        return self.lora_rank if key is None else self.rank_pattern[key]

    def scale_of(self, module: str) -> float:
        """Factor on ``B @ A`` of `module`."""
        key = _matching_key(self.alpha_pattern, module)
        alpha = self.lora_alpha if key is None else self.alpha_pattern[key]
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _matching_key(pattern: Mapping[str, Any], module: str) -> str | None:
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", module)), None)
