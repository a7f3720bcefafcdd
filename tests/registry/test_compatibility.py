from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manylora.errors import InvalidAdapter
from manylora.registry.base_model import BaseModel
from manylora.registry.compatibility import check
from manylora.registry.peft_format import read_peft_folder

PREFIX = "base_model.model."
EMBED = "model.embed_tokens"


@pytest.fixture
def checked(base: BaseModel, make: Callable[..., Path]) -> Callable[..., list[str]]:
    def run(against: BaseModel | None = None, **options: Any) -> list[str]:
        return check(read_peft_folder(make(**options), max_bytes=1 << 20), against or base)

    return run


Checked = Callable[..., list[str]]


def test_adapters_that_fit(checked: Checked, modules_of: Callable[..., Any]) -> None:
    everything = modules_of("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert checked() == []
    assert checked(modules=everything) == []
    assert checked(modules=modules_of("q_proj", layers=[1])) == []


def test_embeddings_and_lm_head_fit(checked: Checked) -> None:
    extra = {
        f"{PREFIX}{EMBED}.lora_embedding_A": (4, 40),
        f"{PREFIX}{EMBED}.lora_embedding_B": (16, 4),
        f"{PREFIX}lm_head.lora_A.weight": (4, 16),
        f"{PREFIX}lm_head.lora_B.weight": (40, 4),
        f"{PREFIX}lm_head.base_layer.weight": (40, 16),
        f"{PREFIX}{EMBED}.base_layer.weight": (40, 16),
    }
    assert checked(extra=extra, target_modules="all-linear") == []


def test_a_resized_vocabulary_is_refused(checked: Checked) -> None:
    with pytest.raises(InvalidAdapter, match="vocabulary was changed"):
        checked(extra={f"{PREFIX}lm_head.base_layer.weight": (48, 16)})


def test_unknown_modules_are_named_and_counted(checked: Checked) -> None:
    unknown = {f"model.layers.{i}.self_attn.q_proj": (16, 16) for i in range(7)}
    with pytest.raises(InvalidAdapter) as caught:
        checked(modules=unknown)
    assert "5 of 7 modules are no linear layers of tiny-base" in caught.value.message
    assert "model.layers.2.self_attn.q_proj" in caught.value.message
    assert "and 2 more" in caught.value.message


def test_what_is_no_linear_layer_is_refused(checked: Checked) -> None:
    with pytest.raises(InvalidAdapter, match=r"input_layernorm"):
        checked(modules={"model.layers.0.input_layernorm": (16, 16), "model.layers.0.self_attn.q_proj": (16, 16)})
    with pytest.raises(InvalidAdapter, match="embed_tokens"):
        checked(modules={EMBED: (40, 16)})


def test_no_usable_tensor(checked: Checked) -> None:
    with pytest.raises(InvalidAdapter, match="none of its 1 modules"):
        checked(modules={"transformer.h.0.attn.c_attn": (16, 16)})
    with pytest.raises(InvalidAdapter, match="lack a prefix"):
        checked(modules={"layers.0.self_attn.q_proj": (16, 16)})
    with pytest.raises(InvalidAdapter, match="prefix too many"):
        checked(modules={"language_model.model.layers.0.self_attn.q_proj": (16, 16)})


def test_shapes_are_compared(checked: Checked) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        checked(modules={"model.layers.0.self_attn.k_proj": (16, 16)})
    assert "A [4, 16] and B [16, 4]; tiny-base needs [4, 16] and [8, 4]" in caught.value.message
    with pytest.raises(InvalidAdapter, match=r"needs \[4, 40\] and \[16, 4\]"):
        checked(
            extra={f"{PREFIX}{EMBED}.lora_embedding_A": (4, 48), f"{PREFIX}{EMBED}.lora_embedding_B": (16, 4)},
            target_modules="all-linear",
        )


@pytest.mark.parametrize(
    "said",
    [
        None,
        "",
        "tiny-base",
        "org/Tiny-Base",
        "/somewhere/models/tiny-base/",
        "C:\\models\\tiny-base",
        "/cache/models--org--tiny-base/snapshots/0123",
        "org/original",
        "nickname",
    ],
)
def test_names_of_the_same_base(checked: Checked, base: BaseModel, said: str | None) -> None:
    known = replace(base, config={**base.config, "_name_or_path": "org/original"}, aliases=("x/nickname",))
    assert checked(known, base_model_name_or_path=said) == []


def test_another_base_is_a_warning(checked: Checked) -> None:
    (warning,) = checked(base_model_name_or_path="org/other-base")
    assert "trained on 'org/other-base', not on 'tiny-base'" in warning


@pytest.mark.parametrize(
    ("said", "served", "warns"),
    [
        (None, "abc", False),
        ("main", "abc", False),
        ("abc", None, False),
        ("abc", "abcdef", False),
        ("abd", "abc", True),
    ],
)
def test_revisions(checked: Checked, base: BaseModel, said: str | None, served: str | None, warns: bool) -> None:
    assert bool(checked(replace(base, revision=served), revision=said)) is warns
