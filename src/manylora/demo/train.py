"""Trains the demo's adapters with PEFT: plain PyTorch on one CPU core, seeded, in float32.

Owns the loop and the files of an adapter's folder; what is learnt is `manylora.demo.lessons`, how much is
`manylora.demo.recipes`. Only the answer's tokens count in the loss, and only their rows meet the vocabulary matrix, the
dearest product of a small model.

    python -m manylora.demo.train --models MODELS --data TEXT --out examples/adapters [NAME …]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.demo import base_model
from manylora.demo.card import model_card
from manylora.demo.lessons import LESSONS, Lesson
from manylora.demo.recipes import RECIPES, Recipe

MAX_TOKENS = 96
WARMUP_SHARE = 0.06
MAX_GRADIENT_NORM = 1.0
LOSS_WINDOW = 20


@dataclass(frozen=True, slots=True)
class Example:
    """A tokenised lesson; the first `prompt_tokens` are the question in the chat template, the rest is learnt."""

    tokens: tuple[int, ...]
    prompt_tokens: int


def main() -> None:
    """Train the named adapters (all of them by default), each written as soon as it is ready."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", type=Path, required=True, help="folder that holds, or gets, the base model")
    parser.add_argument("--data", type=Path, required=True, help="folder with banking77_train.csv, medquad_400.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets one folder per adapter")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}; all where none is given")
    options = parser.parse_args()
    base = base_model.ensure(options.models)
    for name in options.names or RECIPES:
        train(RECIPES[name], base=base, data=options.data, out=options.out)


def train(recipe: Recipe, *, base: Path, data: Path, out: Path) -> Path:
    """Train one adapter and put its folder under `out`, in place of an older one."""
    import torch

    torch.manual_seed(recipe.seed)
    tokenizer, model = _load(recipe, base, out)
    lessons = [_tokenise(tokenizer, lesson) for lesson in LESSONS[recipe.name](data)]
    examples = [example for example in lessons if len(example.tokens) <= MAX_TOKENS]
    _say(f"{recipe.name}: {len(examples)} of {len(lessons)} examples have at most {MAX_TOKENS} tokens")
    started = time.monotonic()
    losses = _fit(recipe, model, examples)
    _say(f"{recipe.name}: trained in {time.monotonic() - started:.0f} s")
    last_loss = sum(losses[-LOSS_WINDOW:]) / len(losses[-LOSS_WINDOW:])
    return _save(model, out / recipe.name, recipe, model_card(recipe, examples=len(examples), last_loss=last_loss))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _load(recipe: Recipe, base: Path, out: Path) -> tuple[Any, Any]:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if recipe.starts_from is not None:
        return tokenizer, PeftModel.from_pretrained(model, out / recipe.starts_from, is_trainable=True)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model.NAME,
        r=recipe.lora_rank,
        lora_alpha=recipe.alpha,
        use_rslora=recipe.rslora,
        target_modules=list(recipe.modules),
        layers_to_transform=None if recipe.layers is None else list(recipe.layers),
        layers_pattern=None if recipe.layers is None else "layers",
    )
    return tokenizer, get_peft_model(model, config)


def _tokenise(tokenizer: Any, lesson: Lesson) -> Example:
    messages = [{"role": "user", "content": lesson.question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    head = tokenizer(prompt, add_special_tokens=False).input_ids
    answer = tokenizer(lesson.answer, add_special_tokens=False).input_ids
    return Example((*head, *answer, tokenizer.eos_token_id), len(head))


def _fit(recipe: Recipe, model: Any, examples: Sequence[Example]) -> list[float]:
    import torch

    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    losses = []
    for step, batch in enumerate(batches(examples, steps=recipe.steps, size=recipe.batch, seed=recipe.seed)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * schedule(step, recipe.steps)
        started = time.monotonic()
        loss = _answer_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        took_s = time.monotonic() - started
        _say(f"{recipe.name}: step {step + 1} of {recipe.steps}, loss {losses[-1]:.3f}, {took_s:.1f} s")
    return losses


def schedule(step: int, steps: int) -> float:
    """The share of the learning rate at a step: a short rise, then a straight line to nothing."""
    warmup = max(1, round(steps * WARMUP_SHARE))
    return (step + 1) / warmup if step < warmup else (steps - step) / (steps - warmup)


def _answer_loss(model: Any, batch: Sequence[Example]) -> Any:
    """Mean cross-entropy of the answers' tokens; padding on the right is never looked at by a causal model."""
    import torch

    width = max(len(example.tokens) for example in batch)
    rows = [list(example.tokens) + [0] * (width - len(example.tokens)) for example in batch]
    mask = torch.tensor([[column < len(example.tokens) for column in range(width)] for example in batch])
    learnt = mask & torch.tensor([[column >= example.prompt_tokens for column in range(width)] for example in batch])
    tokens = torch.tensor(rows)
    llama = model.get_base_model()
    hidden = llama.model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).last_hidden_state
    logits = llama.lm_head(hidden[:, :-1][learnt[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:][learnt[:, 1:]])


def batches(examples: Sequence[Example], *, steps: int, size: int, seed: int) -> Iterator[list[Example]]:
    """`steps` batches through all examples, in a new order each time round; lengths within a batch are alike."""
    shuffle = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    pending: list[list[Example]] = []
    for _ in range(steps):
        if not pending:
            pending = _by_length(shuffle.sample(list(examples), len(examples)), size)
            shuffle.shuffle(pending)
        yield pending.pop()


def _by_length(examples: list[Example], size: int) -> list[list[Example]]:
    """Batches of alike length, so that little padding is computed; a short rest waits for the next round."""
    ordered = sorted(examples, key=lambda example: len(example.tokens))
    return [ordered[start : start + size] for start in range(0, len(ordered) - size + 1, size)]


def _save(model: Any, folder: Path, recipe: Recipe, card: str) -> Path:
    """Write the PEFT folder beside its place, then swap: a half-written adapter is never seen."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    _write(model, partial, recipe)
    (partial / "README.md").write_text(card, encoding="utf-8")
    partial.chmod(0o755)
    if folder.exists():
        shutil.rmtree(folder)
    return partial.rename(folder)


def _write(model: Any, folder: Path, recipe: Recipe) -> None:
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    stored = getattr(torch, recipe.stored)
    weights = {name: tensor.to(stored).contiguous() for name, tensor in get_peft_model_state_dict(model).items()}
    path = folder / "adapter_model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
    config = model.peft_config["default"]
    config.inference_mode = True
    config.save_pretrained(folder)
    _settle(folder / "adapter_config.json")


def _settle(path: Path) -> None:
    """Rewrite the config in one order: PEFT keeps module names in a set, whose order changes from run to run."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["target_modules"] = sorted(config["target_modules"])
    config["base_model_name_or_path"] = base_model.NAME
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
