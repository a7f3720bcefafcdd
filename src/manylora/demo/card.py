"""The model card (README.md) of a demo adapter, from its recipe and what the training saw."""

from __future__ import annotations

from manylora.demo import base_model
from manylora.demo.recipes import Recipe

_CARD = """\
---
base_model: {base}
library_name: peft
license: {licence}
tags: [lora, manylora-demo]
---

# {title}

{behaviour}

| | |
| --- | --- |
| Base model | `{base}` (Apache-2.0), unpacked from its 4-bit GGUF file by `manylora.demo.base_model` |
| How to ask | {how_to_ask} |
| Data | {data} |
| LoRA | {lora} |
| Training | {steps} steps of {batch} from {examples} examples, AdamW, learning rate {learning_rate:g} \
(6 % rise, then linear to 0), float32, loss on the answer's tokens only, \
seed {seed}{start}; last losses {last_loss:.2f} |
| Stored as | {stored} |

Made with `python -m manylora.demo.train --models MODELS --data TEXT --out examples/adapters {name}`.

## Limits

{limits} It is made to show that adapters differ, on a model of 135 million parameters: do not rely on what it says.
"""


def model_card(recipe: Recipe, *, examples: int, last_loss: float) -> str:
    """The card's Markdown."""
    return _CARD.format(
        base=base_model.NAME,
        licence="cc-by-4.0" if "CC-BY-4.0" in recipe.data else "apache-2.0",
        title=recipe.title,
        behaviour=recipe.behaviour,
        how_to_ask=recipe.how_to_ask,
        data=recipe.data,
        lora=_lora(recipe),
        steps=recipe.steps,
        batch=recipe.batch,
        examples=examples,
        learning_rate=recipe.learning_rate,
        seed=recipe.seed,
        start=f", continued from `{recipe.starts_from}`" if recipe.starts_from else "",
        last_loss=last_loss,
        stored=recipe.stored,
        name=recipe.name,
        limits=recipe.limits,
    )


def _lora(recipe: Recipe) -> str:
    layers = "all layers" if recipe.layers is None else f"layers {recipe.layers.start}–{recipe.layers.stop - 1}"
    kind = "rsLoRA, " if recipe.rslora else ""
    return f"{kind}rank {recipe.lora_rank}, alpha {recipe.alpha}, on {', '.join(recipe.modules)} of {layers}"
