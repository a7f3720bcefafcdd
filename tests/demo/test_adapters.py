"""The committed adapters: small, whole, fit for the base model, made as their recipes say, with cards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manylora.demo import asks, base_model
from manylora.demo.recipes import RECIPES
from manylora.demo.run import find_adapters
from manylora.registry import compatibility
from manylora.registry.base_model import BaseModel, describe
from manylora.registry.peft_format import read_peft_folder

MAX_BYTES = 2_000_000
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 64,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
NAMES = list(RECIPES)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    return describe(folder, name=base_model.NAME)


def folder_of(name: str) -> Path:
    return find_adapters() / name


@pytest.mark.parametrize("name", NAMES)
def test_small_enough_to_commit(name: str) -> None:
    files = {path.name: path.stat().st_size for path in folder_of(name).iterdir()}
    assert set(files) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert sum(files.values()) <= MAX_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_accepted_without_a_warning(name: str, base: BaseModel) -> None:
    adapter = read_peft_folder(folder_of(name), max_bytes=MAX_BYTES)
    assert compatibility.check(adapter, base) == []
    assert adapter.lora_rank == RECIPES[name].lora_rank


@pytest.mark.parametrize("name", NAMES)
def test_made_as_the_recipe_says(name: str) -> None:
    recipe = RECIPES[name]
    config = json.loads((folder_of(name) / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base_model.NAME
    assert config["r"] == recipe.lora_rank
    assert config["lora_alpha"] == recipe.alpha
    assert config["use_rslora"] == recipe.rslora
    assert config["target_modules"] == sorted(recipe.modules)
    assert config["layers_to_transform"] == (None if recipe.layers is None else list(recipe.layers))


@pytest.mark.parametrize("name", NAMES)
def test_the_card_is_of_this_recipe(name: str) -> None:
    card = (folder_of(name) / "README.md").read_text()
    recipe = RECIPES[name]
    for part in (recipe.title, recipe.behaviour, recipe.how_to_ask, recipe.data, recipe.limits):
        assert part in card
    assert f"{recipe.steps} steps of {recipe.batch}" in card


def test_the_demo_uses_adapters_that_exist() -> None:
    for name in (*asks.FIRST_FIVE, asks.SIXTH, asks.SECOND_VERSION):
        assert name in RECIPES


def test_shapes_differ() -> None:
    shapes = {(recipe.lora_rank, recipe.modules, recipe.layers, recipe.rslora) for recipe in RECIPES.values()}
    assert len(shapes) == len(RECIPES) - 1  # the second version has the first one's
    assert {recipe.stored for recipe in RECIPES.values()} == {"float32", "bfloat16", "float16"}
