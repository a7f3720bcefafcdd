from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manylora.errors import InvalidAdapter
from manylora.registry import peft_format
from manylora.registry.peft_format import ModuleKind, PeftAdapter, digest, layer_of, read_peft_folder

Q0 = "model.layers.0.self_attn.q_proj"
PREFIX = "base_model.model."
Make = Callable[..., Path]


def read(folder: Path, max_bytes: int = 1 << 20) -> PeftAdapter:
    return read_peft_folder(folder, max_bytes=max_bytes)


def refused(folder: Path, words: str) -> None:
    with pytest.raises(InvalidAdapter, match=words) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_every_refusal_in_the_registrys_source_says_what_to_do() -> None:
    sources = Path(peft_format.__file__).parent.glob("*.py")
    calls = [
        (source.name, node)
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "InvalidAdapter"
    ]
    assert len(calls) > 40
    assert [f"{name}:{call.lineno}" for name, call in calls if len(call.args) < 2] == []


def test_reads_a_plain_adapter(make: Make) -> None:
    adapter = read(make())
    assert set(adapter.modules) == {f"model.layers.{i}.self_attn.{n}" for i in (0, 1) for n in ("q_proj", "v_proj")}
    module = adapter.modules["model.layers.1.self_attn.v_proj"]
    assert (module.layer, module.kind, module.lora_rank, module.scaling) == (1, ModuleKind.LINEAR, 4, 2.0)
    assert (module.in_features, module.out_features) == (16, 8)
    assert adapter.lora_rank == 4
    assert adapter.warnings == ()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_reads_every_float_type(make: Make, dtype: str) -> None:
    assert {tensor.dtype for tensor in read(make(dtype=dtype)).tensors} == {dtype}


def test_rank_pattern_gives_modules_their_own_rank(make: Make) -> None:
    adapter = read(make(ranks={Q0: 8}, rank_pattern={"layers.0.self_attn.q_proj": 8}, alpha_pattern={"q_proj": 32}))
    assert adapter.modules[Q0].lora_rank == 8
    assert adapter.modules[Q0].scaling == 4.0
    assert adapter.modules["model.layers.1.self_attn.q_proj"].scaling == 8.0
    assert adapter.lora_rank == 8


def test_a_pattern_whose_match_depends_on_its_order_is_refused(make: Make) -> None:
    ambiguous = {"self_attn.q_proj": 16, "q_proj": 32}
    refused(make(alpha_pattern=ambiguous), "alpha_pattern has two keys")
    assert read(make(alpha_pattern=dict(sorted(ambiguous.items())))).modules[Q0].scaling == 8.0
    assert read(make(alpha_pattern={"v_proj": 16, "q_proj": 32})).modules[Q0].scaling == 8.0


def test_embeddings_and_lm_head(make: Make) -> None:
    extra = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": (4, 40),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": (16, 4),
        f"{PREFIX}lm_head.lora_A.weight": (4, 16),
        f"{PREFIX}lm_head.lora_B.weight": (40, 4),
        f"{PREFIX}lm_head.base_layer.weight": (40, 16),
    }
    adapter = read(make(extra=extra, target_modules=["q_proj", "v_proj", "embed_tokens", "lm_head"]))
    assert adapter.modules["model.embed_tokens"].kind is ModuleKind.EMBEDDING
    assert adapter.modules["lm_head"].layer is None
    assert {path: copy.shape for path, copy in adapter.base_copies.items()} == {"lm_head": (40, 16)}


def test_a_snapshot_of_the_hub_is_read_as_it_is(make: Make, tmp_path: Path) -> None:
    plain = make()
    blobs, snapshot = (tmp_path / "models--acme--support" / name for name in ("blobs", "snapshots/0a1b"))
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(plain.iterdir())):
        (blobs / f"{number:040x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    found = read(snapshot)
    assert found.config_bytes == read(plain).config_bytes
    assert digest(found.config_bytes, found.weights) == digest(found.config_bytes, read(plain).weights)
    (blobs / f"{1:040x}").write_bytes(b"\0" * 100)
    refused(snapshot, "adapter_model.safetensors")


@pytest.mark.parametrize("selected", ["all-linear", r".*\.(q|v)_proj", None, ["q_proj", "v_proj", "absent"]])
def test_any_kind_of_target_modules(make: Make, selected: Any) -> None:
    assert read(make(target_modules=selected)).warnings == ()


def test_tensors_that_peft_would_leave_out_are_a_warning(make: Make) -> None:
    assert "2 trained modules are not selected" in read(make(target_modules=["q_proj"])).warnings[0]
    assert "2 trained modules are not selected" in read(make(layers_to_transform=[1])).warnings[0]
    assert read(make(layers_to_transform=[0, 1])).warnings == ()
    assert read(make(layers_to_transform=1, modules=_modules_of_layer_1())).warnings == ()


def _modules_of_layer_1() -> dict[str, tuple[int, int]]:
    return {"model.layers.1.self_attn.q_proj": (16, 16)}


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (f"{PREFIX}{Q0}.lora_magnitude_vector", "DoRA"),
        (f"{PREFIX}{Q0}.lora_B.bias", "lora_bias"),
        (f"{PREFIX}{Q0}.bias", "trained bias"),
        (f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta", "token embedding"),
        (f"{PREFIX}lm_head.modules_to_save.weight", "modules_to_save"),
        (f"{PREFIX}lm_head.weight", "whole embedding"),
        (f"{PREFIX}{Q0}.lora_A.default.weight", "adapter's name"),
        (f"{PREFIX}{Q0}.something", "not part of a LoRA adapter"),
        (f"{PREFIX}{Q0}.base_layer.weight", "not part of a LoRA adapter"),
        (f"{Q0}.lora_A.weight", "does not begin"),
    ],
)
def test_foreign_tensors_are_named(make: Make, tensor: str, words: str) -> None:
    refused(make(extra={tensor: (4, 4)}), words)


def test_both_halves_are_needed(make: Make) -> None:
    refused(make(drop=[f"{PREFIX}{Q0}.lora_B.weight"]), f"'{Q0}' has lora_A but no lora_B")
    refused(make(drop=[f"{PREFIX}{Q0}.lora_A.weight"]), f"'{Q0}' has lora_B but no lora_A")
    refused(make(extra={f"{PREFIX}{Q0}.lora_embedding_A": (4, 4)}), "also the other kind")


def test_ranks_must_agree_with_the_config(make: Make) -> None:
    refused(make(ranks={Q0: 8}), "has rank 8, adapter_config.json says 4")
    refused(make(r=8), "has rank 4, adapter_config.json says 8")
    refused(make(drop=[f"{PREFIX}{Q0}.lora_B.weight"], extra={}), "no lora_B")
    refused(make(extra={f"{PREFIX}{Q0}.lora_B.weight": (16, 3)}), "lora_B.weight' has rank 3")


@pytest.mark.parametrize("shape", [(4,), (4, 0), (0, 16), (4, 4, 4)])
def test_shapes_that_are_no_matrix(make: Make, shape: tuple[int, ...]) -> None:
    refused(make(extra={f"{PREFIX}{Q0}.lora_A.weight": shape}), "two dimensions are needed")


def test_no_tensor_at_all(make: Make) -> None:
    refused(make(modules={}), "no LoRA tensor")


def test_a_pickle_is_refused_with_the_way_out(make: Make) -> None:
    folder = make()
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({}))
    refused(folder, "adapter_model.bin is a pickle.*safe_serialization=True")


def test_what_lies_beside_is_never_looked_at(make: Make) -> None:
    folder = make()
    (folder / "adapter_model.bin").write_bytes(b"bad")
    (folder / "sitecustomize.py").write_text("raise SystemExit")
    read(folder)


def test_missing_files_and_folders(make: Make, tmp_path: Path) -> None:
    refused(tmp_path / "absent", "not a folder")
    refused(tmp_path / "a\0b", "not a folder")
    folder = make()
    (folder / "adapter_model.safetensors").unlink()
    refused(folder, "adapter_model.safetensors is missing")
    (folder / "adapter_config.json").unlink()
    refused(folder, "adapter_config.json is missing")


def test_configs_that_are_no_config(make: Make) -> None:
    for text in ("", "[]", "{", '{"r":4,"r":8}', '{"lora_alpha": NaN}', "[" * 5000, '{"a": ' + "1" * 5000 + "}"):
        folder = make()
        (folder / "adapter_config.json").write_text(text)
        refused(folder, "adapter_config.json")
    folder = make()
    (folder / "adapter_config.json").write_text(json.dumps({"a": "x" * (1 << 20)}))
    refused(folder, "larger than")


def test_links_may_not_leave_the_folder(make: Make, tmp_path: Path) -> None:
    folder = make()
    weights = folder / "adapter_model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    refused(folder, "link that leaves the folder")
    weights.unlink()
    (tmp_path / "elsewhere").rename(folder / "real")
    weights.symlink_to("real")
    assert read(folder).lora_rank == 4


def test_special_files_are_refused_without_blocking(make: Make) -> None:
    folder = make()
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")
    refused(folder, "not a plain file")


def test_the_size_is_limited(make: Make) -> None:
    with pytest.raises(InvalidAdapter, match="more than the 100 allowed"):
        read(make(), max_bytes=100)


def test_the_digest_is_as_documented(make: Make) -> None:
    adapter = read(make())
    data = (adapter.folder / "adapter_model.safetensors").read_bytes()
    config = adapter.config_bytes
    expected = hashlib.sha256(b"manylora/adapter/1\n" + len(config).to_bytes(8, "little") + config + data).hexdigest()
    assert digest(config, adapter.weights) == expected


def test_the_digest_follows_content_and_nothing_else(make: Make) -> None:
    def of(folder: Path) -> str:
        adapter = read(folder)
        return digest(adapter.config_bytes, adapter.weights)

    same = make()
    reordered = json.loads((same / "adapter_config.json").read_text())
    (same / "adapter_config.json").write_text(json.dumps(dict(reversed(reordered.items())), indent=4))
    assert of(make()) == of(same)
    assert len({of(make()), of(make(fill=2)), of(make(lora_alpha=9)), of(make(dtype="F16"))}) == 4


@pytest.mark.parametrize(
    ("path", "layer"), [(Q0, 0), ("model.layers.31.mlp.experts.3.w1", 31), ("lm_head", None), ("h.x²", None)]
)
def test_layer_of(path: str, layer: int | None) -> None:
    assert layer_of(path) == layer
