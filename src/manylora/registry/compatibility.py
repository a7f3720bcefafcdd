"""Does an adapter fit a base model? Every trained module must exist there, with the shapes that the adapter has.

An adapter of which some tensors would be dropped answers wrongly without a sign of it, and one of which all would be
dropped answers as the base model; so both are refused, naming what does not fit. Doubts about which base model was
meant are returned as warnings, for a person to overrule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from manylora.adapter import shown
from manylora.errors import InvalidAdapter
from manylora.peft_config import CONFIG_FILE, WEIGHTS_FILE
from manylora.registry.base_model import EMBEDDING, BaseModel
from manylora.registry.peft_config import PeftConfig
from manylora.registry.peft_format import LoraModule, ModuleKind, PeftAdapter

_NAMED_AT_MOST = 3
_SNAPSHOT = re.compile(r"models--(?:[^/]+--)?([^/]+)/snapshots/[^/]+/?$")


def check(adapter: PeftAdapter, base: BaseModel) -> list[str]:
    """Warnings about the adapter on this base model; `InvalidAdapter` where it cannot be served on it at all."""
    _refuse_unknown(adapter, base)
    for module in adapter.modules.values():
        _check_shape(module, base)
    for path, copy in adapter.base_copies.items():
        _check_copy(path, copy.shape, base)
    return [*adapter.warnings, *_origin_warnings(adapter.config, base)]


def _refuse_unknown(adapter: PeftAdapter, base: BaseModel) -> None:
    unknown = [path for path, module in adapter.modules.items() if not _served(module, base)]
    if not unknown:
        return
    count = len(unknown)
    if count == len(adapter.modules):
        raise InvalidAdapter(
            f"{WEIGHTS_FILE}: none of its {count} modules is a linear layer of {base.name}: {_some(unknown)}",
            _prefix_hint(unknown, base) or "it was trained on another model; choose the base model it was trained on",
        )
    raise InvalidAdapter(
        f"{WEIGHTS_FILE}: {count} of {len(adapter.modules)} modules are no linear layers of {base.name}:"
        f" {_some(unknown)}",
        "choose the base model that it was trained on, or train again on that model's linear layers only",
    )


def _served(module: LoraModule, base: BaseModel) -> bool:
    is_embedding = module.path.rpartition(".")[2] == EMBEDDING
    return module.path in base.modules and is_embedding == (module.kind is ModuleKind.EMBEDDING)


def _prefix_hint(unknown: list[str], base: BaseModel) -> str:
    """Many an adapter was trained on a model wrapped once more or once less than the one served."""
    endings = tuple(f".{path}" for path in unknown)
    if any(path.endswith(endings) for path in base.modules):
        return "its names lack a prefix: it was trained on the bare model, without the language-model head around it"
    if any(path.endswith(tuple(f".{known}" for known in base.modules)) for path in unknown):
        return "its names have a prefix too many: it was trained on a model that wraps this one"
    return ""


def _some(paths: Iterable[str]) -> str:
    named = [shown(path, 120) for path in paths]
    more = f" and {len(named) - _NAMED_AT_MOST} more" if len(named) > _NAMED_AT_MOST else ""
    return ", ".join(named[:_NAMED_AT_MOST]) + more


def _check_shape(module: LoraModule, base: BaseModel) -> None:
    rows, columns = base.modules[module.path]
    # An embedding's weight is stored [vocabulary, features], a linear layer's [out, in].
    expected_in, expected_out = (rows, columns) if module.kind is ModuleKind.EMBEDDING else (columns, rows)
    if (module.in_features, module.out_features) == (expected_in, expected_out):
        return
    lora_rank = module.lora_rank
    raise InvalidAdapter(
        f"{WEIGHTS_FILE}: module '{shown(module.path, 160)}' has A [{lora_rank}, {module.in_features}] and"
        f" B [{module.out_features}, {lora_rank}]; {base.name} needs [{lora_rank}, {expected_in}] and"
        f" [{expected_out}, {lora_rank}]",
        "it was trained on a model of another size or vocabulary; choose the base model that it was trained on",
    )


def _check_copy(path: str, shape: tuple[int, ...], base: BaseModel) -> None:
    """PEFT saves a copy of the base weights beside LoRA on embeddings; `base_copies` compares what they hold."""
    expected = base.modules.get(path)
    if expected != shape:
        raise InvalidAdapter(
            f"{WEIGHTS_FILE}: '{shown(path, 160)}.base_layer.weight' is {list(shape)},"
            f" {base.name} has {list(expected) if expected else 'no such module'}",
            "the vocabulary was changed in training, which an adapter cannot carry; serve it as a base of its own",
        )


# --- which base model was meant -------------------------------------------------------------------------------------


def _origin_warnings(config: PeftConfig, base: BaseModel) -> list[str]:
    if config.base_model is not None and _short(config.base_model) not in _names(base):
        said = shown(config.base_model, 160)
        return [f"{CONFIG_FILE} says that it was trained on '{said}', not on '{shown(base.name, 160)}'"]
    said_revision = config.revision
    if said_revision in (None, "main") or base.revision is None:
        return []
    assert said_revision is not None
    if base.revision.startswith(said_revision) or said_revision.startswith(base.revision):
        return []
    said, served = shown(said_revision, 60), shown(base.revision, 60)
    return [f"{CONFIG_FILE} says that it was trained on revision '{said}' of the base model, '{served}' is served"]


def _names(base: BaseModel) -> set[str]:
    original = base.config.get("_name_or_path")
    names = [base.name, base.source, *base.aliases, *([original] if isinstance(original, str) and original else [])]
    return {_short(name) for name in names}


def _short(name: str) -> str:
    """What a folder and a hub id of the same model have in common: the last part of the path, in lower case."""
    path = name.replace("\\", "/").rstrip("/")
    if match := _SNAPSHOT.search(path):
        return match[1].lower()
    return path.rpartition("/")[2].lower()
