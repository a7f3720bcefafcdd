"""The zoo itself: if its references could not tell right from wrong, nothing here would be worth running."""

from __future__ import annotations

import json

from harness import recipes
from harness.zoo import BASE, Zoo

NAMED = (*recipes.CASES, *recipes.GENERATIONS)


def test_every_prompt_is_answered_differently_by_every_adapter(zoo: Zoo) -> None:
    for prompt in zoo.group("short", "medium", "long", "chat"):
        assert set(prompt.answers) == {BASE, *(recipe.name for recipe in NAMED)}
        assert len(set(prompt.answers.values())) == len(prompt.answers)
        assert all(len(answer) == recipes.MAX_TOKENS for answer in prompt.answers.values())


def test_every_adapter_of_the_fleet_has_its_own_answer(zoo: Zoo) -> None:
    answers = {recipe.name: zoo.fleet_prompt(recipe.name).answers[recipe.name] for recipe in recipes.FLEET}
    assert len(set(answers.values())) == len(recipes.FLEET) == 100


def test_files_are_what_the_recipes_say(zoo: Zoo) -> None:
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    for recipe in (*NAMED, *recipes.FLEET[:3]):
        header = _header(zoo, recipe.name)
        assert {tensor["dtype"] for tensor in header.values()} == {names[recipe.dtype]}
        ranks = {tensor["shape"][0] for name, tensor in header.items() if "lora_A" in name}
        assert ranks == {recipe.lora_rank, *recipe.rank_pattern.values()} or recipe.name == "patterns"
        config = json.loads((zoo.adapter(recipe.name) / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == recipes.BASE_NAME


def test_the_patterns_reach_the_file(zoo: Zoo) -> None:
    ranks = {name: tensor["shape"][0] for name, tensor in _header(zoo, "patterns").items() if "lora_A" in name}
    assert {rank for name, rank in ranks.items() if "q_proj" in name} == {4}
    assert {rank for name, rank in ranks.items() if "layers.2.self_attn.v_proj" in name} == {16}
    assert {rank for name, rank in ranks.items() if "o_proj" in name} == {8}


def test_the_layer_subset_leaves_layers_out(zoo: Zoo) -> None:
    assert {name.split(".")[4] for name in _header(zoo, "layer-subset")} == {"1", "3"}


def _header(zoo: Zoo, name: str) -> dict[str, dict[str, list[int]]]:
    data = (zoo.adapter(name) / "adapter_model.safetensors").read_bytes()
    header: dict[str, dict[str, list[int]]] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__", None)
    return header
