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
WEIGHTS_FILE = "adapter_model.safetensors"

_DIGEST_DOMAIN = b"manylora/adapter/1\n"
_LITERAL = re.compile(r"[A-Za-z0-9_.]+")


def canonical_config(config: Mapping[str, object]) -> bytes:
    """The config as the digest sees it: sorted keys, no spaces, and `target_modules` (a set, to PEFT) in order.

    Raises `RecursionError` for one nested too deeply, `ValueError` for NaN and infinities.
    """
    canonical = dict(config)
    targets = canonical.get("target_modules")
    if isinstance(targets, list):
        canonical["target_modules"] = sorted(targets, key=str)
    return json.dumps(canonical, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def adapter_digest(config: bytes, weights: Iterable[bytes]) -> str:
    """SHA-256 (64 hex) of an adapter; `weights` yields its safetensors file from start to end."""
    state = digest_state(config)
    for chunk in weights:
        state.update(chunk)
    return state.hexdigest()


def digest_state(config: bytes) -> hashlib._Hash:
    """The hash before the weights: a domain tag, the length of `config` (8 bytes, little endian), and `config`.

    `config` is the output of `canonical_config`.
    """
    return hashlib.sha256(_DIGEST_DOMAIN + len(config).to_bytes(8, "little") + config)


def match_pattern(patterns: Mapping[str, object], module: str) -> str | None:
    """The first key that PEFT's rule matches to `module`: a regular expression for its end, after a dot."""
    return next((key for key in patterns if _matches(key, module)), None)


def is_literal(key: str) -> bool:
    """Whether a pattern's key is a plain module name (in which a dot matches any character, as in PEFT)."""
    return _LITERAL.fullmatch(key) is not None


def _matches(key: str, module: str) -> bool:
    if is_literal(key) and not _may_end_with(module, key):
        return False  # spares the regular expression for nearly all of the hundreds of keys that some adapters have
    return re.match(rf"(.*\.)?({key})$", module) is not None


def _may_end_with(module: str, key: str) -> bool:
    """A key without repetitions matches as many characters as it has, at the end and after a dot."""
    before = len(module) - len(key)
    return module.endswith(key.rpartition(".")[2]) and (before == 0 or (before > 0 and module[before - 1] == "."))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraScaling:
    """Rank and scale of every module by the rules of PEFT (`get_pattern_key`, `LoraLayer.update_layer`)."""

    lora_rank: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_checked(cls, config: Mapping[str, Any]) -> LoraScaling:
        """Read a config that was checked when it was published; a missing optional field has PEFT's default."""
        return cls(
            lora_rank=config["r"],
            lora_alpha=config["lora_alpha"],
            use_rslora=bool(config.get("use_rslora")),
            rank_pattern=config.get("rank_pattern") or {},
            alpha_pattern=config.get("alpha_pattern") or {},
        )

    def rank_of(self, module: str) -> int:
        """The rank that PEFT gives to `module` (its path without `base_model.model.`)."""
        found = match_pattern(self.rank_pattern, module)
        return self.lora_rank if found is None else self.rank_pattern[found]

    def alpha_of(self, module: str) -> float:
        """The alpha that PEFT gives to `module`."""
        found = match_pattern(self.alpha_pattern, module)
        return self.lora_alpha if found is None else self.alpha_pattern[found]

    def scaling_of(self, module: str) -> float:
        """The factor on B·A·x: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        lora_rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(lora_rank) if self.use_rslora else lora_rank)
