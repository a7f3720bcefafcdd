"""`adapter_config.json`: what it says, and which of PEFT's many features cannot be served as they were trained.

A field is honoured or the adapter is refused; none is accepted and ignored. Fields that only mattered while
training are listed as such. A field that this version has never heard of is a warning where it is set: PEFT itself
would drop it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from manylora.adapter import shown
from manylora.errors import InvalidAdapter
from manylora.peft_config import CONFIG_FILE, LoraScaling, canonical_config, is_literal

MAX_LORA_RANK = 512
MAX_ALPHA = 1e6
MAX_PATTERNS = 4096
_MAX_PATTERN_CHARS = 512
_MAX_EXPRESSIONS = 64
_T = TypeVar("_T")

# Only shaped the training, or describe the file; what they say is already in the tensors.
_TRAINING_ONLY = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "runtime_config",
        "target_modules",
    }
)
_READ = frozenset(
    {
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "fan_in_fan_out",
        "init_lora_weights",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "revision",
        "task_type",
        "use_rslora",
    }
)
# These initialisations leave the base model's weights alone; the others (PiSSA, OLoRA, CorDA, LoftQ) change them.
_HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
# With these, PEFT adds nothing to the base model but LoRA; feature extraction reads its hidden states (embeddings).
_TASKS = ("CAUSAL_LM", "FEATURE_EXTRACTION")
_TASK_REMEDIES = {
    "SEQ_CLS": "a classification head cannot be served; train with task_type='CAUSAL_LM', with the classes as words",
    "TOKEN_CLS": "a classification head cannot be served; train with task_type='CAUSAL_LM', with the classes as words",
    "QUESTION_ANS": "a span head cannot be served; train with task_type='CAUSAL_LM', with the answers as text",
    "SEQ_2_SEQ_LM": "encoder-decoder models cannot be served; train a decoder-only model with task_type='CAUSAL_LM'",
}
_PLAIN = "train again with plain LoRA"
# Field to (what it is, what to do). Refused wherever it is set to something that PEFT would act on.
_UNSUPPORTED: Mapping[str, tuple[str, str]] = {
    "use_dora": ("DoRA", "train again with use_dora=False"),
    "lora_bias": ("biases inside LoRA layers", "train again with lora_bias=False"),
    "modules_to_save": ("whole modules trained beside LoRA", "train again with modules_to_save=None"),
    "trainable_token_indices": ("trained token embeddings", "train again without trainable_token_indices"),
    "ensure_weight_tying": ("adapters tied across embeddings", "train again with ensure_weight_tying=False"),
    "target_parameters": ("LoRA on bare parameters", "train again with target_modules only"),
    "layer_replication": ("repeated layers", "serve the grown model as a base of its own"),
    "alora_invocation_tokens": ("activated LoRA (aLoRA)", _PLAIN),
    "use_qalora": ("QALoRA", _PLAIN),
    "use_bdlora": ("block-diagonal LoRA (BD-LoRA)", _PLAIN),
    "megatron_config": ("Megatron parallel layers", "export the adapter to plain Hugging Face names"),
    "arrow_config": ("Arrow routing", _PLAIN),
    "kasa_config": ("KaSA", _PLAIN),
    "velora_config": ("VeLoRA", _PLAIN),
    "monteclora_config": ("MonteCLoRA", _PLAIN),
    "fan_in_fan_out": ("transposed weights (Conv1D layers)", "serve a base model with plain linear layers"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig(LoraScaling):
    """The fields of `adapter_config.json` that matter for serving."""

    base_model: str | None
    revision: str | None
    target_modules: tuple[str, ...] | str | None
    layers_to_transform: tuple[int, ...] | None
    warnings: tuple[str, ...]


def parse_config(raw: Mapping[str, object]) -> PeftConfig:
    """Read a config; `InvalidAdapter` names the first field that is wrong or unsupported, and what to do."""
    if raw.get("peft_type") != "LORA":
        raise _invalid("peft_type", raw.get("peft_type"), "only LORA adapters can be served")
    _refuse_other_task(raw)
    _refuse_unsupported(raw)
    return PeftConfig(
        lora_rank=_rank("r", raw.get("r")),
        lora_alpha=_alpha("lora_alpha", raw.get("lora_alpha")),
        use_rslora=_flag(raw, "use_rslora"),
        rank_pattern=_patterns(raw, "rank_pattern", _rank),
        alpha_pattern=_patterns(raw, "alpha_pattern", _alpha),
        base_model=_text(raw, "base_model_name_or_path"),
        revision=_text(raw, "revision"),
        target_modules=_target_modules(raw.get("target_modules")),
        layers_to_transform=_layers(raw.get("layers_to_transform")),
        warnings=_unknown_fields(raw),
    )


def canonical_bytes(raw: Mapping[str, object]) -> bytes:
    """`manylora.peft_config.canonical_config`, with the refusal of what cannot be spelt."""
    try:
        return canonical_config(raw)
    except RecursionError as error:
        raise InvalidAdapter(f"{CONFIG_FILE} is nested too deeply", "save the adapter again with PEFT") from error


# --- rank_pattern and alpha_pattern ---------------------------------------------------------------------------------


_CLASS = re.compile(r"\[\^?(?:[A-Za-z0-9_.]|-(?!-))+\]")
_ESCAPE = re.compile(r"\\[.dDwWsS\-_/]")
_RISKY = re.compile(r"[\\\[\]]|\)[*+{?]|\(\?|[*+?}][*+{?]")


def _patterns(raw: Mapping[str, object], field: str, read: Callable[[str, object], _T]) -> Mapping[str, _T]:
    value = raw.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise _invalid(field, value, f"give a map of at most {MAX_PATTERNS} entries")
    if sum(not is_literal(key) for key in value) > _MAX_EXPRESSIONS:
        raise _invalid(field, "…", f"use at most {_MAX_EXPRESSIONS} regular expressions; plain names are not counted")
    for key in value:
        _check_pattern(field, key)
    return {key: read(f"{field}['{shown(key)}']", item) for key, item in value.items()}


def is_cheap_pattern(pattern: str) -> bool:
    """Whether the shape of a regular expression shows that no name can make matching it slow.

    What explodes is backtracking into repeated or overlapping groups, so those stay few; module names need no more.
    """
    if len(pattern) > _MAX_PATTERN_CHARS:
        return False
    bare = _CLASS.sub("C", _ESCAPE.sub("E", pattern.replace("(?:", "(")))
    return not _RISKY.search(bare) and sum(map(bare.count, "*+?{")) <= 2 and bare.count("(") <= 2


def _check_pattern(field: str, key: str) -> None:
    """Refuse a key that is no regular expression, or whose matching could take for ever."""
    if not is_cheap_pattern(key):
        raise _invalid(field, key, "use plain module names, or patterns with at most two groups and two repetitions")
    try:
        re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise _invalid(field, key, "give a regular expression or a module name") from error


# --- single fields --------------------------------------------------------------------------------------------------


def _refuse_other_task(raw: Mapping[str, object]) -> None:
    task = raw.get("task_type")
    if task is None or task in _TASKS:
        return
    known = _TASK_REMEDIES.get(task) if isinstance(task, str) else None
    raise _invalid("task_type", task, known or f"give null or one of {', '.join(_TASKS)}")


def _refuse_unsupported(raw: Mapping[str, object]) -> None:
    for field, (what, remedy) in _UNSUPPORTED.items():
        if raw.get(field):
            raise InvalidAdapter(f"{CONFIG_FILE}: {field} is set: {what} cannot be served", remedy)
    if raw.get("bias") not in (None, "none"):
        raise _invalid("bias", raw["bias"], "trained biases cannot be served; train again with bias='none'")
    init = raw.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in _HARMLESS_INITS)):
        raise _invalid(
            "init_lora_weights",
            init,
            "it changes the base model's weights; save the adapter with path_initial_model_for_weight_conversion",
        )


def _unknown_fields(raw: Mapping[str, object]) -> tuple[str, ...]:
    known = _READ | _TRAINING_ONLY | _UNSUPPORTED.keys()
    names = [shown(name) for name, value in raw.items() if name not in known and value]
    if not names:
        return ()
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (f"{CONFIG_FILE} sets fields that this version does not know: {', '.join(names[:3])}{more}",)


def _rank(field: str, value: object) -> int:
    if type(value) is int and 1 <= value <= MAX_LORA_RANK:
        return value
    raise _invalid(field, value, f"the rank has to be a whole number from 1 to {MAX_LORA_RANK}")


def _alpha(field: str, value: object) -> float:
    if type(value) in (int, float) and isinstance(value, (int, float)) and 0 < value <= MAX_ALPHA:
        return float(value)
    raise _invalid(field, value, f"alpha has to be a number above 0 and at most {MAX_ALPHA:g}")


def _flag(raw: Mapping[str, object], field: str) -> bool:
    value = raw.get(field)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise _invalid(field, value, "give true or false")


def _text(raw: Mapping[str, object], field: str) -> str | None:
    value = raw.get(field)
    if value is None or (isinstance(value, str) and len(value) <= 4096):
        return value or None
    raise _invalid(field, value, "give a text or null")


def _target_modules(value: object) -> tuple[str, ...] | str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise _invalid("target_modules", value, "give a list of names, a regular expression or 'all-linear'")


def _layers(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    items = value if isinstance(value, list) else [value]
    if all(type(item) is int and item >= 0 for item in items):
        return tuple(items) or None  # PEFT takes an empty list for no restriction
    raise _invalid("layers_to_transform", value, "give layer numbers")


def _invalid(field: str, value: object, remedy: str) -> InvalidAdapter:
    return InvalidAdapter(f"{CONFIG_FILE}: {field} is {shown(json.dumps(value), 60)}", remedy)
