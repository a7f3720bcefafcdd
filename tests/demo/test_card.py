"""Model cards say what was done."""

from __future__ import annotations

import pytest

from manylora.demo.card import model_card
from manylora.demo.recipes import RECIPES


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_card_says_what_was_done(name: str) -> None:
    recipe = RECIPES[name]
    card = model_card(recipe, examples=272, last_loss=0.125)
    assert f"# {recipe.title}" in card
    assert f"{recipe.steps} steps of {recipe.batch} from 272 examples" in card
    assert f"seed {recipe.seed}" in card
    assert recipe.limits in card
    assert f"rank {recipe.lora_rank}" in card


def test_the_licence_follows_the_data() -> None:
    assert "license: cc-by-4.0" in model_card(RECIPES["bank"], examples=1, last_loss=0)
    assert "license: apache-2.0" in model_card(RECIPES["sql"], examples=1, last_loss=0)


def test_a_continued_adapter_names_its_start() -> None:
    assert "continued from `json`" in model_card(RECIPES["json-v2"], examples=1, last_loss=0)
