"""What a worker asks for: its name, and the names that it gives to a checkpoint's modules."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from manylora.staging.layout import EXACT, PAGES, EngineLayout, ModuleLayout, NameMap, Part

MODULE = ModuleLayout("m.qkv", 8, (4, 2, 2), False, (Part("m.q", 0, 1), Part("m.kv", 1, 2)), 16, (8, 4, 4))
LAYOUT = EngineLayout(EXACT, "float32", 0, 64, (MODULE,), NameMap())


def test_a_key_is_32_hex_characters() -> None:
    assert len(LAYOUT.key) == 32
    assert set(LAYOUT.key) <= set("0123456789abcdef")


def test_a_layout_has_the_same_key_on_the_other_side() -> None:
    module = msgspec.structs.replace(MODULE, a_columns=((0, 4), (8, 12)), b_rows=(((0, 4),), ((0, 2),), ((0, 2),)))
    names = NameMap(patterns=((r"h\.(\d)", r"layers.\1"),), prefixes=(("model.", "language_model."),))
    sent = msgspec.structs.replace(LAYOUT, modules=(module,), names=names, skipped=("mtp.",))
    received = msgspec.json.decode(msgspec.json.encode(sent), type=EngineLayout)
    assert received == sent
    assert received.key == sent.key


@pytest.mark.parametrize(
    "change",
    [
        {"form": PAGES},
        {"dtype": "bfloat16"},
        {"columns": 64},
        {"max_lora_rank": 32},
        {"modules": ()},
        {"modules": (MODULE, MODULE)},
        {"names": NameMap(prefixes=(("a", "b"),))},
        {"names": NameMap(suffixes=(("a", "b"),))},
        {"skipped": ("mtp.",)},
    ],
    ids=str,
)
def test_whatever_changes_the_packed_form_changes_the_key(change: dict[str, Any]) -> None:
    assert msgspec.structs.replace(LAYOUT, **change).key != LAYOUT.key


@pytest.mark.parametrize(
    "change",
    [
        {"in_features": 9},
        {"widths": (4, 2, 3)},
        {"is_lookup": True},
        {"parts": (Part("m.qk", 0, 2), Part("m.v", 2, 1))},
        {"full_in_features": 8},
        {"full_widths": (4, 2, 2)},
        {"a_columns": ((0, 8),)},
        {"a_columns": ((8, 16),)},
        {"b_rows": (((0, 4),), ((0, 2),), ((0, 2),))},
    ],
    ids=str,
)
def test_so_does_whatever_changes_a_module(change: dict[str, Any]) -> None:
    changed = msgspec.structs.replace(LAYOUT, modules=(msgspec.structs.replace(MODULE, **change),))
    assert changed.key != LAYOUT.key


def test_ranks_have_keys_of_their_own() -> None:
    keys = {
        msgspec.structs.replace(LAYOUT, modules=(msgspec.structs.replace(MODULE, a_columns=((at, at + 8),)),)).key
        for at in (0, 8)
    }
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("names", "old", "new"),
    [
        (NameMap(), "model.layers.0.q_proj", "model.layers.0.q_proj"),
        (NameMap(prefixes=(("model.", "language_model.model."),)), "model.a.model.b", "language_model.model.a.model.b"),
        (NameMap(prefixes=(("model.", "x."),)), "the.model.a", "the.model.a"),
        (NameMap(substrings=((".attn.", ".self_attn."),)), "a.attn.b.attn.c", "a.self_attn.b.attn.c"),
        (NameMap(suffixes=((".proj", ".projection"),)), "a.proj.b.proj", "a.proj.b.projection"),
        (NameMap(suffixes=((".proj", ".projection"),)), "a.proj.b", "a.proj.b"),
        (NameMap(patterns=((r"^h\.(\d+)", r"model.layers.\1"),)), "h.12.q", "model.layers.12.q"),
        (
            NameMap(
                patterns=((r"^h\.", "layers."),),
                substrings=(("layers", "blocks"),),
                prefixes=(("blocks.", "model.blocks."),),
                suffixes=((".0", ".first"),),
            ),
            "h.0",
            "model.blocks.first",
        ),
    ],
)
def test_names_are_mapped_in_the_engines_order(names: NameMap, old: str, new: str) -> None:
    assert names(old) == new
