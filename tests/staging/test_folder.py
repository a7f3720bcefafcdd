"""Folders to factors: against B·A·scale computed directly, and everything that must be refused."""

from __future__ import annotations

import contextlib
import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

import peft_folders  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from peft_folders import (  # noqa: E402
    EMBED,
    GATE_UP,
    HEAD,
    IN_PROJ,
    LAYER,
    MODULES,
    OUT,
    QKV,
    VOCABULARY,
    Tensors,
    config,
    described,
    factors,
    layout,
    module,
    publish,
    safetensors,
    whole_adapter,
    write,
)

from manylora.errors import CorruptBlob, InvalidAdapter, ManyloraError, NotFound  # noqa: E402
from manylora.peft_config import CONFIG_FILE, WEIGHTS_FILE  # noqa: E402
from manylora.staging.folder import AdapterWeights, read_folder  # noqa: E402
from manylora.staging.layout import EngineLayout, ModuleLayout, NameMap, Ranges  # noqa: E402
from manylora.staging.packed_form import pack_weights  # noqa: E402

O_PROJ = f"{LAYER}.self_attn.o_proj"
PREFIX = "base_model.model."


def read(tmp_path: Path, tensors: bytes | Tensors, engine: EngineLayout | None = None, **settings: Any) -> Any:
    return read_folder(write(tmp_path / "adapter", tensors, config(**settings)), engine or layout())


def refused(tmp_path: Path, tensors: bytes | Tensors, words: str, engine: EngineLayout | None = None) -> None:
    with pytest.raises(InvalidAdapter, match=words):
        read(tmp_path, tensors, engine)


def delta(tensors: Tensors, name: str, scale: float = 2.0) -> Any:
    """scale · B · A of a checkpoint's module."""
    a, b = (
        next(tensor.float() for key, tensor in tensors.items() if key.startswith(f"{PREFIX}{name}.") and kind in key)
        for kind in ("_A", "_B")
    )
    return scale * (b @ a)


def slices(found: AdapterWeights, number: int) -> list[Any]:
    """B · A of each slice (None: unchanged)."""
    return [None if pair is None else pair[1].float() @ pair[0].float() for pair in found.weights[number]]


def close(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


# ---- what is read ----


def test_every_module_is_the_adapters_with_its_scale(tmp_path: Path) -> None:
    tensors = whole_adapter(8)
    found = read(tmp_path, tensors)
    assert sorted(found.weights) == list(range(len(MODULES)))
    assert found.unknown == ()
    assert found.modules == len(tensors) // 2
    for number, each in enumerate(MODULES):
        deltas = torch.cat([delta(tensors, part.name) for part in each.parts])
        close(torch.cat(slices(found, number)), deltas)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_numbers_are_rounded_once_to_the_engines(tmp_path: Path, dtype: str, bound: float) -> None:
    tensors = factors(O_PROJ, 8, 24, 20)
    found = read(tmp_path, tensors, layout(dtype=dtype))
    ((a, b),) = found.weights[OUT]
    assert a.dtype == b.dtype == getattr(torch, dtype)
    assert torch.equal(a, tensors[f"{PREFIX}{O_PROJ}.lora_A.weight"].to(a.dtype))
    assert torch.equal(b, (tensors[f"{PREFIX}{O_PROJ}.lora_B.weight"] * 2.0).to(b.dtype))
    torch.testing.assert_close(slices(found, OUT)[0], delta(tensors, O_PROJ), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_files_may_hold_any_of_three_types(tmp_path: Path, dtype: Any) -> None:
    tensors = whole_adapter(4, dtype=dtype)
    found = read(tmp_path, tensors, lora_rank=4)
    close(slices(found, OUT)[0], delta(tensors, O_PROJ))


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"lora_rank": 4, "lora_alpha": 6}, 1.5),
        ({"lora_rank": 4, "lora_alpha": 6.5}, 1.625),
        ({"lora_rank": 4, "lora_alpha": 6, "use_rslora": True}, 3.0),
        ({"lora_rank": 8, "lora_alpha": 6, "rank_pattern": {"o_proj": 4}}, 1.5),
        ({"lora_rank": 4, "lora_alpha": 1, "alpha_pattern": {"self_attn.o_proj": 6}}, 1.5),
        ({"lora_rank": 2, "lora_alpha": 6, "use_rslora": True, "rank_pattern": {r".*\.o_proj": 4}}, 3.0),
        ({"lora_rank": 4, "lora_alpha": 8, "alpha_pattern": {"v_proj": 100, "proj": 100}}, 2.0),
        ({"lora_rank": 4, "lora_alpha": -8}, -2.0),
        ({"lora_rank": 4, "lora_alpha": 0}, 0.0),
    ],
    ids=str,
)
def test_scales_are_pefts(tmp_path: Path, settings: dict[str, Any], scale: float) -> None:
    tensors = factors(O_PROJ, 4, 24, 20)
    close(slices(read(tmp_path, tensors, **settings), OUT)[0], delta(tensors, O_PROJ, scale))


def test_each_module_has_its_own_scale(tmp_path: Path) -> None:
    q, v = (f"{LAYER}.self_attn.{part}_proj" for part in "qv")
    tensors = factors(q, 4, 20, 24) | factors(v, 2, 20, 8)
    found = read(tmp_path, tensors, lora_rank=4, lora_alpha=4, rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 6})
    of_q, of_k, of_v = slices(found, QKV)
    close(of_q, delta(tensors, q, 1.0))
    assert of_k is None
    close(of_v, delta(tensors, v, 3.0))


def test_one_tensor_for_a_whole_fused_layer_is_cut_into_its_slices(tmp_path: Path) -> None:
    tensors = factors(f"{LAYER}.self_attn.qkv_proj", 8, 20, 40)
    found = read(tmp_path, tensors)
    for mine, whole in zip(slices(found, QKV), delta(tensors, MODULES[QKV].name).split((24, 8, 8)), strict=True):
        close(mine, whole)


def test_fewer_parts_than_slices(tmp_path: Path) -> None:
    qkv, z = f"{LAYER}.in_proj_qkv", f"{LAYER}.in_proj_z"
    tensors = factors(qkv, 8, 20, 16) | factors(z, 4, 20, 6)
    found = read(tmp_path, tensors, rank_pattern={"in_proj_z": 4})
    close(torch.cat(slices(found, IN_PROJ)[:3]), delta(tensors, qkv))
    close(slices(found, IN_PROJ)[3], delta(tensors, z, 16 / 4))
    only_z = read(tmp_path, factors(z, 8, 20, 6))
    assert [each is None for each in only_z.weights[IN_PROJ]] == [True, True, True, False]
    only_qkv = read(tmp_path, factors(qkv, 8, 20, 16))
    assert [each is None for each in only_qkv.weights[IN_PROJ]] == [False, False, False, True]


def test_an_adapter_without_modules_changes_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, {}) == AdapterWeights({}, 0, ())


def test_tables_may_be_shorter_than_the_engines_padded_ones(tmp_path: Path) -> None:
    for rows in (VOCABULARY, 64):
        embed = factors("model.embed_tokens", 4, rows, 20, lookup=True)
        head = factors("lm_head", 4, 20, rows)
        found = read(tmp_path, embed | head, lora_rank=4)
        close(slices(found, EMBED)[0], delta(embed, "model.embed_tokens"))
        close(slices(found, HEAD)[0], delta(head, "lm_head"))


@pytest.mark.parametrize("form", ["exact", "pages"])
def test_a_table_longer_than_the_engines_is_refused_when_it_is_packed(tmp_path: Path, form: str) -> None:
    engine = layout(form=form)
    for tensors in (factors("model.embed_tokens", 4, 65, 20, lookup=True), factors("lm_head", 4, 20, 65)):
        found = read(tmp_path, tensors, engine)
        with pytest.raises(InvalidAdapter, match="takes lora_A of"):
            pack_weights(engine, found.weights)


def test_copies_of_the_base_models_tables_are_left_out(tmp_path: Path) -> None:
    tensors = factors("lm_head", 4, 20, VOCABULARY)
    copies = {
        f"{PREFIX}lm_head.base_layer.weight": torch.full((VOCABULARY, 20), math.nan),
        f"{PREFIX}model.embed_tokens.base_layer.weight": torch.zeros(VOCABULARY, 20),
    }
    found = read(tmp_path, tensors | copies)
    assert (list(found.weights), found.modules, found.unknown) == ([HEAD], 1, ())


def test_numbers_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    tensors = factors(O_PROJ, 4, 24, 20)
    for spaces in range(4):
        weights = safetensors(tensors)
        length = int.from_bytes(weights[:8], "little")
        moved = described(weights[8 : 8 + length] + b" " * spaces, weights[8 + length :])
        close(slices(read(tmp_path, moved), OUT)[0], delta(tensors, O_PROJ, 2.0))


# ---- names ----


@pytest.mark.parametrize(
    ("names", "checkpoint"),
    [
        (NameMap(prefixes=(("transformer.", "model."),)), "transformer.layers.0.self_attn.o_proj"),
        (NameMap(substrings=((".attention.", ".self_attn."),)), "model.layers.0.attention.o_proj"),
        (NameMap(patterns=((r"^h\.(\d+)\.", r"model.layers.\1."),)), "h.0.self_attn.o_proj"),
        (
            NameMap(patterns=((r"\.out\.lora_A", r".o_proj.lora_A"),)),
            "model.layers.0.self_attn.out",
        ),
    ],
)
def test_modules_are_renamed(tmp_path: Path, names: NameMap, checkpoint: str) -> None:
    tensors = factors(checkpoint, 4, 24, 20)
    found = read(tmp_path, tensors, layout(names=names))
    assert found.unknown == ()
    close(slices(found, OUT)[0], delta(tensors, checkpoint))


def test_a_prefix_with_a_dot_renames_the_head(tmp_path: Path) -> None:
    """As vLLM has it for most models of images: what it renames are names of tensors."""
    names = NameMap(prefixes=(("lm_head.", "language_model.lm_head."), ("model.", "language_model.model.")))
    engine = layout(names=names, modules=(module("language_model.lm_head", 20, (64,), padded=True),))
    tensors = factors("lm_head", 4, 20, VOCABULARY)
    found = read(tmp_path, tensors, engine)
    assert found.unknown == ()
    close(slices(found, 0)[0], delta(tensors, "lm_head"))


def test_a_suffix_of_tensors_is_none_of_modules(tmp_path: Path) -> None:
    found = read(tmp_path, factors(O_PROJ, 4, 24, 20), layout(names=NameMap(suffixes=(("o_proj", "x"),))))
    assert (list(found.weights), found.unknown) == ([OUT], ())


def test_scales_go_by_the_checkpoints_names(tmp_path: Path) -> None:
    names = NameMap(substrings=((".attention.out", ".self_attn.o_proj"),))
    tensors = factors("model.layers.0.attention.out", 4, 24, 20)
    found = read(tmp_path, tensors, layout(names=names), alpha_pattern={"out": 40, "o_proj": 1})
    close(slices(found, OUT)[0], delta(tensors, "model.layers.0.attention.out", 5.0))


def test_a_given_function_renames_instead(tmp_path: Path) -> None:
    tensors = factors("other", 4, 24, 20)
    folder = write(tmp_path / "adapter", tensors, config())
    found = read_folder(folder, layout(), lambda name: name.replace("other", O_PROJ))
    close(slices(found, OUT)[0], delta(tensors, "other"))


def test_pooling_models_are_trained_without_the_models_prefix(tmp_path: Path) -> None:
    name = "layers.0.self_attn.o_proj"
    tensors = factors(name, 4, 24, 20)
    found = read(tmp_path, tensors)
    assert found.unknown == ()
    close(slices(found, OUT)[0], delta(tensors, name))


def test_names_need_no_prefix_of_pefts(tmp_path: Path) -> None:
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in factors(O_PROJ, 4, 24, 20).items()}
    assert list(read(tmp_path, tensors).weights) == [OUT]


@pytest.mark.parametrize("name", ["mtp.layers.0.x", "model.mtp.x", "mtp.y"])
def test_what_the_engine_skips_is_neither_used_nor_unknown(tmp_path: Path, name: str) -> None:
    tensors = factors(O_PROJ, 4, 24, 20) | factors(name, 4, 3, 3)
    found = read(tmp_path, tensors, layout(skipped=("mtp.",)))
    assert (list(found.weights), found.modules, found.unknown) == ([OUT], 2, ())


@pytest.mark.parametrize("name", ["model.smtp.x", "model.mtp", "amtp.x"])
def test_only_whole_names_are_skipped(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, factors(name, 4, 3, 3), layout(skipped=("mtp.x", "smtp.y")))
    assert found.unknown == (name,)


def test_modules_that_the_engine_lacks_are_told(tmp_path: Path) -> None:
    tensors = factors(O_PROJ, 4, 24, 20) | factors("model.layers.9.self_attn.o_proj", 4, 24, 20)
    found = read(tmp_path, tensors)
    assert found.unknown == ("model.layers.9.self_attn.o_proj",)
    assert found.modules == 2
    assert list(found.weights) == [OUT]


# ---- shards ----


def sharded(each: ModuleLayout, columns: Ranges | None, rows: tuple[Ranges, ...] | None) -> ModuleLayout:
    """A rank's share of a module."""
    in_features = sum(end - first for first, end in columns) if columns else each.in_features
    widths = tuple(sum(end - first for first, end in ranges) for ranges in rows) if rows else each.widths
    return msgspec.structs.replace(each, in_features=in_features, widths=widths, a_columns=columns, b_rows=rows)


def test_the_shards_of_columns_make_up_the_whole(tmp_path: Path) -> None:
    tensors = factors(O_PROJ, 8, 24, 20)
    shares: list[Ranges] = [((0, 6), (18, 24)), ((6, 18),)]
    whole = torch.zeros(20, 24)
    for columns in shares:
        engine = layout(modules=(sharded(MODULES[OUT], columns, None),))
        found = read(tmp_path, tensors, engine)
        part = slices(found, 0)[0]
        at = 0
        for first, end in columns:
            whole[:, first:end] = part[:, at : at + end - first]
            at += end - first
        pack_weights(engine, found.weights)
    close(whole, delta(tensors, O_PROJ))


@pytest.mark.parametrize("fused", [False, True], ids=["by part", "one tensor"])
def test_the_shards_of_rows_make_up_the_whole(tmp_path: Path, fused: bool) -> None:
    names = [MODULES[QKV].name] if fused else [part.name for part in MODULES[QKV].parts]
    widths = [40] if fused else [24, 8, 8]
    tensors: Tensors = {}
    for name, width in zip(names, widths, strict=True):
        tensors |= factors(name, 8, 20, width)
    expected = torch.cat([delta(tensors, name) for name in names]).split((24, 8, 8))
    # The second rank's queries lie in two places, and both ranks share the values.
    ranks: list[tuple[Ranges, ...]] = [(((6, 18),), ((0, 4),), ((0, 8),)), (((0, 6), (18, 24)), ((4, 8),), ((0, 8),))]
    for rows in ranks:
        engine = layout(modules=(sharded(MODULES[QKV], None, rows),))
        found = read(tmp_path, tensors, engine)
        for mine, whole, ranges in zip(slices(found, 0), expected, rows, strict=True):
            close(mine, torch.cat([whole[first:end] for first, end in ranges]))
        pack_weights(engine, found.weights)


def test_rows_are_those_of_the_right_slice(tmp_path: Path) -> None:
    """Of an adapter of the last part only, the last slice's rows are cut, not the first's."""
    tensors = factors(f"{LAYER}.in_proj_z", 8, 20, 6)
    rows = (((0, 4),), ((0, 2),), ((2, 4),), ((1, 3), (5, 6)))
    found = read(tmp_path, tensors, layout(modules=(sharded(MODULES[IN_PROJ], None, rows),)))
    close(slices(found, 0)[3], delta(tensors, f"{LAYER}.in_proj_z")[[1, 2, 5]])


def test_a_shards_adapter_must_have_the_whole_shape(tmp_path: Path) -> None:
    engine = layout(modules=(sharded(MODULES[OUT], ((0, 12),), None),))
    refused(tmp_path, factors(O_PROJ, 8, 12, 20), "has 12 columns, the layer 24", engine)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_A.weight": None}, "only one of lora_A and lora_B"),
        ({"lora_B.weight": None}, "only one of lora_A and lora_B"),
        ({"lora_A.weight": (8, 23)}, "lora_A has 23 columns, the layer 24"),
        ({"lora_A.weight": (8, 25)}, "lora_A has 25 columns, the layer 24"),
        ({"lora_B.weight": (19, 8)}, "lora_B has 19 rows, the layer 20"),
        ({"lora_B.weight": (21, 8)}, "lora_B has 21 rows, the layer 20"),
        ({"lora_B.weight": (20, 7)}, "lora_A has rank 8, lora_B 7"),
        ({"lora_A.weight": (24,)}, "two dimensions"),
        ({"lora_B.weight": (20, 8, 1)}, "two dimensions"),
        ({"lora_A.weight": ()}, "two dimensions"),
        ({"lora_A.weight": (0, 24), "lora_B.weight": (20, 0)}, "empty"),
        ({"lora_A.weight": (8, 0)}, "empty"),
        ({"lora_B.weight": (0, 8)}, "empty"),
        ({"lora_magnitude_vector": (20,)}, "lora_magnitude_vector is not a LoRA tensor"),
        ({"lora_B.bias": (20,)}, "is not a LoRA tensor"),
        ({"lora_A.default.weight": (8, 24)}, "is not a LoRA tensor"),
        ({"base_layer.weight": (20, 24)}, "is not a LoRA tensor"),
        ({"weight": (20, 24)}, "is not a LoRA tensor"),
    ],
    ids=str,
)
def test_tensors_that_make_no_module(tmp_path: Path, change: dict[str, tuple[int, ...] | None], words: str) -> None:
    tensors = factors(O_PROJ, 8, 24, 20)
    for name, shape in change.items():
        if shape is None:
            del tensors[f"{PREFIX}{O_PROJ}.{name}"]
        else:
            tensors[f"{PREFIX}{O_PROJ}.{name}"] = torch.zeros(shape)
    refused(tmp_path, tensors, words)


def test_ranks_over_the_engines_limit(tmp_path: Path) -> None:
    engine = layout(max_lora_rank=8)
    assert list(read(tmp_path, factors(O_PROJ, 8, 24, 20), engine).weights) == [OUT]
    with pytest.raises(InvalidAdapter, match="has rank 9, this engine takes up to 8") as caught:
        read(tmp_path, factors(O_PROJ, 9, 24, 20), engine)
    assert "--max-lora-rank" in caught.value.hint


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e30])
@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_numbers_that_overflow(tmp_path: Path, half: str, value: float) -> None:
    tensors = factors(O_PROJ, 8, 24, 20)
    tensors[f"{PREFIX}{O_PROJ}.{half}.weight"][3, 5] = value
    refused(tmp_path, tensors, "overflows")


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_nan_beside_zeros(tmp_path: Path, half: str) -> None:
    tensors = {name: tensor * 0 for name, tensor in factors(O_PROJ, 8, 24, 20).items()}
    tensors[f"{PREFIX}{O_PROJ}.{half}.weight"][0, 0] = math.nan
    refused(tmp_path, tensors, "overflows")


def test_numbers_that_float16_cannot_hold(tmp_path: Path) -> None:
    """Each factor must fit, though their product is small."""
    engine = layout(dtype="float16")
    tensors = {name: tensor * 0 for name, tensor in factors(O_PROJ, 8, 24, 20).items()}
    for half, largest in (("lora_A", 65504.0), ("lora_B", 65504.0 / 2)):
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        weight = changed[f"{PREFIX}{O_PROJ}.{half}.weight"]
        weight[0, 0] = largest
        ((a, b),) = read(tmp_path, changed, engine).weights[OUT]
        assert torch.isfinite(a).all()
        assert torch.isfinite(b).all()
        weight[0, 0] = largest * 1.001
        refused(tmp_path, changed, "only 6.6e\\+04", engine)


@pytest.mark.parametrize("alpha", [1e300, 10**400])
def test_scales_that_overflow(tmp_path: Path, alpha: float) -> None:
    folder = write(tmp_path / "adapter", factors(O_PROJ, 8, 24, 20), config(lora_alpha=alpha))
    with pytest.raises(InvalidAdapter):
        read_folder(folder, layout())


@pytest.mark.parametrize("raw", [b"NaN", b"Infinity"])
def test_scales_that_are_no_numbers(tmp_path: Path, raw: bytes) -> None:
    folder = write(tmp_path / "a", factors(O_PROJ, 8, 24, 20), b'{"r": 8, "lora_alpha": ' + raw + b"}")
    with pytest.raises(InvalidAdapter, match="overflows"):
        read_folder(folder, layout())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b'{"r": 8}',
        b'{"r": 0, "lora_alpha": 8}',
        b'{"r": -1, "lora_alpha": 8, "use_rslora": true}',
        b'{"r": "8", "lora_alpha": 8}',
        b'{"r": 8, "lora_alpha": null}',
        b'{"r": 8, "lora_alpha": 8, "rank_pattern": [1]}',
        b'{"r": 8, "lora_alpha": 8, "rank_pattern": {"o_proj": "x"}}',
        b'{"r": 8, "lora_alpha": 8, "alpha_pattern": {"o_proj(": 8}}',
    ],
    ids=lambda raw: raw[:60].decode(errors="replace"),
)
def test_configs_that_cannot_be_used(tmp_path: Path, raw: bytes) -> None:
    folder = write(tmp_path / "adapter", factors(O_PROJ, 8, 24, 20), raw)
    with pytest.raises(InvalidAdapter, match=CONFIG_FILE + "|cannot be read"):
        read_folder(folder, layout())


@pytest.mark.parametrize(
    "twice",
    [
        (f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.qkv_proj"),
        (f"{LAYER}.self_attn.qkv_proj", f"{LAYER}.self_attn.v_proj"),
        (f"{LAYER}.in_proj_qkv", f"{LAYER}.in_proj"),
        (O_PROJ, O_PROJ.removeprefix("model.")),
        (O_PROJ, O_PROJ.replace("model", "other", 1)),
    ],
)
def test_a_slice_that_comes_twice(tmp_path: Path, twice: tuple[str, str]) -> None:
    """Which of the two was meant cannot be known."""
    sizes = {"q_proj": 24, "v_proj": 8, "qkv_proj": 40, "in_proj_qkv": 16, "in_proj": 22, "o_proj": 20}
    tensors: Tensors = {}
    for name in twice:
        tensors |= factors(name, 4, 24 if name.endswith("o_proj") else 20, sizes[name.rpartition(".")[2]])
    refused(tmp_path, tensors, "twice", layout(names=NameMap(prefixes=(("other.", "model."),))))


def test_a_tensor_that_comes_twice(tmp_path: Path) -> None:
    tensors = factors(O_PROJ, 8, 24, 20)
    for more in (
        {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()},
        {f"{PREFIX}{O_PROJ}.lora_embedding_A": torch.zeros(8, 24)},
    ):
        refused(tmp_path, tensors | more, "twice")


def entry(dtype: Any = "F32", shape: Any = (8, 24), offsets: Any = (0, 768)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "lie",
    [
        entry(offsets=(4, 772)),
        entry(offsets=(640, 1408)),
        entry(offsets=(1 << 62, (1 << 62) + 768)),
        entry(offsets=(10**30, 10**30 + 768)),
        entry(offsets=(-768, 0)),
        entry(offsets=(-100, 668)),
        entry(offsets=(768, 0)),
        entry(offsets=(0, 767)),
        entry(offsets=(0, 0)),
        entry(offsets=(0,)),
        entry(offsets=()),
        entry(offsets="ab"),
        entry(offsets=None),
        entry(offsets=(0.0, 768.0)),
        entry(shape=(8, 25)),
        entry(shape=(-8, -24)),
        entry(shape=(-1, 1), offsets=(4, 0)),
        entry(shape=(-1, 24), offsets=(96, 0)),
        entry(shape=(0, -1), offsets=(0, 0)),
        entry(shape=(0, 10**30), offsets=(0, 0)),
        entry(shape=(8.0, 24)),
        entry(shape="ab"),
        entry(shape=7),
        entry(dtype="F64", offsets=(0, 1536)),
        entry(dtype="I32"),
        entry(dtype=None),
        entry(dtype=[]),
        {},
        {"dtype": "F32"},
        [],
        None,
        7,
        "F32",
    ],
    ids=str,
)
def test_headers_that_lie(tmp_path: Path, lie: Any) -> None:
    name = f"{PREFIX}{O_PROJ}.lora_A.weight"
    weights = described({name: lie}, bytes(771))
    refused(tmp_path, weights, f"{WEIGHTS_FILE} cannot be read")


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        b"\x01",
        bytes(7),
        bytes(8),
        b"\xff" * 8,
        b"\xff" * 100,
        (5).to_bytes(8, "little") + b"{}",
        described([], b""),
    ],
    ids=lambda weights: weights[:12].hex(),
)
def test_files_that_are_none(tmp_path: Path, weights: bytes) -> None:
    refused(tmp_path, weights, "cannot be read")


def test_a_file_cut_off_anywhere(tmp_path: Path) -> None:
    weights = safetensors(factors(O_PROJ, 8, 24, 20))
    header = 8 + int.from_bytes(weights[:8], "little")
    for length in (*range(0, header + 8, 7), header, header + 767, header + 768, len(weights) - 1):
        refused(tmp_path, weights[:length], "cannot be read")


@given(st.data())
def test_any_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    numbers = st.integers(-5, 900) | st.integers() | st.none() | st.floats()
    entries = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", None]),
            "shape": st.lists(numbers, max_size=3),
            "data_offsets": st.lists(numbers, max_size=3),
        }
    )
    names = st.sampled_from([f"{PREFIX}{O_PROJ}.lora_A.weight", f"{PREFIX}{O_PROJ}.lora_B.weight", "x"])
    folder = tmp_path_factory.getbasetemp() / "any-header"
    header = data.draw(st.dictionaries(names, entries, max_size=3))
    write(folder, described(header, bytes(data.draw(st.integers(0, 900)))), config())
    with contextlib.suppress(InvalidAdapter):
        read_folder(folder, layout())


# ---- content and digest ----


def test_a_folder_named_by_its_digest_is_checked(tmp_path: Path) -> None:
    tensors = factors(O_PROJ, 8, 24, 20)
    digest = publish(tmp_path, tensors)
    assert list(read_folder(tmp_path / digest, layout()).weights) == [OUT]
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        sound = (tmp_path / digest / name).read_bytes()
        for at in (0, len(sound) // 2, len(sound) - 1):
            for flipped in (1, 128):
                changed = bytearray(sound)
                changed[at] ^= flipped
                (tmp_path / digest / name).write_bytes(changed)
                with pytest.raises(CorruptBlob, match="no longer match"):
                    read_folder(tmp_path / digest, layout())
        for changed in (bytearray(sound[:-1]), bytearray(sound + b"\0"), bytearray()):
            (tmp_path / digest / name).write_bytes(changed)
            with pytest.raises(CorruptBlob, match="no longer match"):
                read_folder(tmp_path / digest, layout())
        (tmp_path / digest / name).write_bytes(sound)


def test_anothers_folder_under_a_digest(tmp_path: Path) -> None:
    mine = publish(tmp_path, factors(O_PROJ, 8, 24, 20))
    theirs = publish(tmp_path, factors(O_PROJ, 8, 24, 20))
    shutil.rmtree(tmp_path / mine)
    (tmp_path / theirs).rename(tmp_path / mine)
    with pytest.raises(CorruptBlob):
        read_folder(tmp_path / mine, layout())


def test_a_folder_that_was_deleted_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_folder(tmp_path / ("a" * 64), layout())


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_folder_without_one_of_its_files(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "adapter", factors(O_PROJ, 8, 24, 20), config())
    (folder / name).unlink()
    with pytest.raises(InvalidAdapter, match="cannot be read: No such file"):
        read_folder(folder, layout())
    (folder / name).mkdir()
    with pytest.raises(InvalidAdapter, match="cannot be read"):
        read_folder(folder, layout())


def test_no_tensor_of_odd_name_breaks_a_message(tmp_path: Path) -> None:
    for name in ("\ud800", "\n\x1b[2J", "x" * 100_000, "\u202e"):
        for tensor in (name, f"{name}.lora_A.weight"):
            with pytest.raises(ManyloraError) as caught:
                read(tmp_path, described({tensor: entry()}, bytes(768)))
            assert str(caught.value).isprintable()
            assert str(caught.value).isascii() or len(str(caught.value)) < 500
            assert len(str(caught.value)) < 500


def test_modules_of_the_layout_do_not_mix(tmp_path: Path) -> None:
    """Every module's factors are its own, at ranks of its own."""
    gate, up = (f"{LAYER}.mlp.{part}_proj" for part in ("gate", "up"))
    tensors = factors(gate, 4, 20, 300) | factors(up, 16, 20, 5000) | factors(O_PROJ, 8, 24, 20)
    found = read(tmp_path, tensors, rank_pattern={"gate_proj": 4, "up_proj": 16})
    assert sorted(found.weights) == [OUT, GATE_UP]
    of_gate, of_up = slices(found, GATE_UP)
    close(of_gate, delta(tensors, gate, 4.0))
    close(of_up, delta(tensors, up, 1.0))
    assert peft_folders.LAYER in O_PROJ
