from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manylora.errors import InvalidInput
from manylora.registry.base_model import BaseModel, describe

COMMIT = "0123456789abcdef"


def test_the_weights_headers_are_the_truth(base: BaseModel) -> None:
    assert base.name == "tiny-base"
    assert base.modules["model.layers.1.self_attn.k_proj"] == (8, 16)
    assert base.modules["model.embed_tokens"] == (40, 16)
    assert not any("layernorm" in path for path in base.modules)
    assert base.vocab_size == 40
    assert base.revision is None


def test_a_tied_head_has_the_embeddings_shape(base: BaseModel) -> None:
    assert base.modules["lm_head"] == (40, 16)


def test_without_weights_the_shapes_follow_from_the_config(base_folder: Path, base: BaseModel) -> None:
    (base_folder / "model.safetensors").unlink()
    assert describe(base_folder).modules == base.modules


def test_quantised_weights_are_not_believed(
    base_folder: Path, base: BaseModel, base_config: dict[str, Any], tensors: Callable[..., bytes]
) -> None:
    (base_folder / "config.json").write_text(json.dumps(base_config | {"quantization_config": {"bits": 4}}))
    (base_folder / "model.safetensors").write_bytes(tensors({"model.layers.0.self_attn.q_proj.weight": (128, 1)}))
    assert describe(base_folder).modules == base.modules


def test_several_files(
    base_folder: Path, base: BaseModel, base_tensors: Callable[..., Any], tensors: Callable[..., bytes]
) -> None:
    (base_folder / "model.safetensors").unlink()
    weight_map = {}
    for index, name in enumerate(base_tensors()):
        file = f"model-{index % 2}.safetensors"
        weight_map[name] = file
    for file in set(weight_map.values()):
        shapes = {name: shape for name, shape in base_tensors().items() if weight_map[name] == file}
        (base_folder / file).write_bytes(tensors(shapes))
    (base_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert describe(base_folder).modules == base.modules


def test_a_hub_id_is_found_in_the_cache(base_folder: Path, base: BaseModel, tmp_path: Path) -> None:
    repo = tmp_path / "cache" / "models--org--tiny-base"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots").mkdir()
    base_folder.rename(repo / "blobs")
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(repo / "blobs" / name)
    for model in ("org/tiny-base", snapshot):
        found = describe(model, cache=tmp_path / "cache")
        assert (found.name, found.revision) == ("org/tiny-base", COMMIT)
        assert found.modules == base.modules
    (repo / "refs" / "main").unlink()
    assert describe("org/tiny-base", cache=tmp_path / "cache").revision == COMMIT
    (repo / "snapshots" / "other").mkdir()
    with pytest.raises(InvalidInput, match="not in the local cache"):
        describe("org/tiny-base", cache=tmp_path / "cache")


def test_a_name_of_ones_own(base_folder: Path) -> None:
    assert describe(base_folder, name="served", aliases=("other",)).name == "served"


@pytest.mark.parametrize("model", ["", "../x", "/absent/folder", "a/b/c", "org/absent", "x\0y", "x" * 5000])
def test_what_is_no_model(model: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        describe(model, cache=tmp_path)
    assert caught.value.hint
    assert len(caught.value.message) < 600


def test_folders_that_are_no_model(tmp_path: Path, base_folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"config\.json cannot be read"):
        describe(tmp_path)
    (base_folder / "model.safetensors").write_bytes(b"junk of some length")
    with pytest.raises(InvalidInput, match="base model tiny-base"):
        describe(base_folder)
    (base_folder / "model.safetensors").unlink()
    (base_folder / "config.json").write_text('{"model_type": "novel"}')
    with pytest.raises(InvalidInput, match="cannot be told"):
        describe(base_folder)
    (base_folder / "config.json").write_text('{"model_type": "llama", "hidden_size": "big"}')
    with pytest.raises(InvalidInput, match="hidden_size"):
        describe(base_folder)
    (base_folder / "config.json").write_text("[]")
    with pytest.raises(InvalidInput, match="not a JSON object"):
        describe(base_folder)
