"""Builds the zoo into a folder: a random Llama with tokenizer, adapters in PEFT's format, PEFT's own greedy answers.

Run as a process (``python build_zoo.py FOLDER``), so that torch, transformers and peft stay out of the tests. An
answer is kept only if it is clear: every token wins by `MIN_LOGIT_GAP`, and no two adapters answer alike.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import recipes
from harness.recipes import PromptPlan, Recipe

CANDIDATES = 16
"""Drawn for each prompt plan; enough that `count` of them are clear."""

FLEET_CANDIDATES = 5
Answers = dict[str, list[int]]


def build_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, the special tokens, and enough pairs of letters to fill the vocabulary."""
    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    pairs = [(a, b) for a in letters for b in letters]
    pairs = pairs[: recipes.VOCAB_SIZE - len(vocab) - len(recipes.SPECIAL_TOKENS)]
    for a, b in pairs:
        vocab[a + b] = len(vocab)
    inner = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in recipes.SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>",
        model_max_length=recipes.MAX_POSITION, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = recipes.CHAT_TEMPLATE
    assert len(tokenizer) == recipes.VOCAB_SIZE, len(tokenizer)
    tokenizer.save_pretrained(folder)
    return tokenizer


def printable_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens whose text is plain ASCII: prompts are drawn from these, and answers hold no others."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    texts = {number: tokenizer.decode([number]) for number in range(recipes.VOCAB_SIZE) if number not in special}
    return [number for number, text in texts.items() if text.isascii() and text.isprintable()]


def build_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Weights of about unit gain, so that attention and MLP matter; a wide output layer, so that winners are clear."""
    config = LlamaConfig(
        vocab_size=recipes.VOCAB_SIZE, hidden_size=recipes.HIDDEN, intermediate_size=recipes.FFN,
        num_hidden_layers=recipes.LAYERS, num_attention_heads=recipes.HEADS, num_key_value_heads=recipes.KV_HEADS,
        max_position_embeddings=recipes.MAX_POSITION, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                gain = 6.0 if name == "lm_head.weight" else 1.3
                weight.normal_(0, gain / weight.shape[1] ** 0.5)
        model.model.embed_tokens.weight.normal_(0, 1)
        unspeakable = sorted(set(range(recipes.VOCAB_SIZE)) - set(printable_ids(tokenizer)))
        model.lm_head.weight[unspeakable] = 0
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    return model


def peft_model(base: LlamaForCausalLM, recipe: Recipe) -> PeftModel:
    targets = recipe.target_modules
    config = LoraConfig(
        r=recipe.lora_rank, lora_alpha=recipe.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_rslora=recipe.use_rslora, rank_pattern=recipe.rank_pattern, alpha_pattern=recipe.alpha_pattern,
        layers_to_transform=list(recipe.layers) if recipe.layers else None, task_type="CAUSAL_LM", lora_dropout=0.0,
    )  # fmt: skip
    model = get_peft_model(copy.deepcopy(base), config)
    model.peft_config["default"].base_model_name_or_path = recipes.BASE_NAME
    return model


def build_adapter(model: PeftModel, recipe: Recipe, folder: Path) -> None:
    """A PEFT folder whose `lora_B` is not zero, scaled so that the change is `strength` of the base's weight."""
    torch.manual_seed(recipe.seed)
    with torch.no_grad():
        for module in model.modules():
            if "default" in getattr(module, "lora_B", {}):
                _fill(module, recipe.strength)
    model.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False)
    _store_as(folder / "adapter_model.safetensors", getattr(torch, recipe.dtype))
    (folder / "README.md").unlink(missing_ok=True)


def _fill(module: Any, strength: float) -> None:
    down, up = module.lora_A["default"].weight, module.lora_B["default"].weight
    weight, scale = module.base_layer.weight, module.scaling["default"]
    down.normal_(0, down.shape[1] ** -0.5)
    up.normal_(0, 1)
    up.mul_(strength * weight.norm() / (scale * (up @ down).norm()))


def _store_as(file: Path, dtype: torch.dtype) -> None:
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def with_adapter(base: LlamaForCausalLM, folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()


@torch.inference_mode()
def greedy(
    model: Any, prompts: Sequence[Sequence[int]], cache: DynamicCache | None = None, steps: int = recipes.MAX_TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers [prompts, steps] and the smallest gap between the two best logits of each [prompts]."""
    ids = torch.tensor(prompts)
    cache = DynamicCache(config=model.config) if cache is None else cache
    tokens, gaps = [], []
    for _ in range(steps):
        best = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1].topk(2)
        ids = best.indices[:, :1]
        tokens.append(ids)
        gaps.append(best.values[:, 0] - best.values[:, 1])
    return torch.cat(tokens, 1), torch.stack(gaps, 1).min(1).values


def candidates(plan: PromptPlan, alphabet: list[int], seed: int, count: int = CANDIDATES) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    pick = torch.tensor(alphabet)[torch.randint(len(alphabet), (count, plan.length), generator=draw)]
    pick[:, : plan.shared_prefix] = pick[0, : plan.shared_prefix]
    return pick.tolist()


def clear_ones(
    models_: dict[str, Any], prompts: list[list[int]], wanted: int, what: str
) -> list[tuple[list[int], Answers]]:
    """The first `wanted` prompts to which every model's answer is clear and unlike the others'."""
    results = {name: greedy(model, prompts) for name, model in models_.items()}
    kept = []
    for row, prompt in enumerate(prompts):
        answers = {name: tokens[row].tolist() for name, (tokens, _) in results.items()}
        clear = min(float(gap[row]) for _, gap in results.values()) >= recipes.MIN_LOGIT_GAP
        if clear and len({tuple(answer[:8]) for answer in answers.values()}) == len(answers):
            kept.append((prompt, answers))
    assert len(kept) >= wanted, f"{what}: {len(kept)} of {len(prompts)} prompts are clear, {wanted} are needed"
    return kept[:wanted]


def check_stale_cache_shows(generations: dict[str, Any], prompt: list[int], answers: Answers) -> None:
    """KV cache of one generation must change the answer of the next, or a test of the prefix cache proves nothing."""
    prefix = next(plan.shared_prefix for plan in recipes.PROMPTS if plan.group == "long")
    for old, new in zip(list(generations), list(generations)[1:], strict=False):
        cache = DynamicCache(config=generations[old].config)
        with torch.inference_mode():
            generations[old](input_ids=torch.tensor([prompt[:prefix]]), past_key_values=cache, use_cache=True)
        stale, _ = greedy(generations[new], [prompt[prefix:]], cache)
        assert stale[0].tolist() != answers[new], f"{new} answers alike on the cache of {old}"


def build_fleet(base: LlamaForCausalLM, root: Path, alphabet: list[int]) -> list[dict[str, Any]]:
    """Every adapter of the fleet with the prompts, of a common set, that it answers clearly."""
    prompts = candidates(recipes.FLEET_PROMPT, alphabet, 77, FLEET_CANDIDATES)
    answers: dict[str, list[tuple[int, list[int]]]] = {}
    model = peft_model(base, recipes.FLEET[0])
    for recipe in recipes.FLEET:
        build_adapter(model, recipe, root / recipe.name)
        tokens, gaps = greedy(with_adapter(base, root / recipe.name), prompts, steps=recipes.FLEET_MAX_TOKENS)
        rows = [row for row in range(len(prompts)) if float(gaps[row]) >= recipes.MIN_LOGIT_GAP]
        assert len(rows) >= recipes.FLEET_PROMPT.count, recipe.name
        answers[recipe.name] = [(row, tokens[row].tolist()) for row in rows[: recipes.FLEET_PROMPT.count]]
    first = [tuple(pairs[0][1]) for pairs in answers.values()]
    assert len(set(first)) == len(first), "two adapters of the fleet answer alike"
    return [
        {"group": "fleet", "token_ids": prompts[row], "messages": None, "answers": {name: answer}}
        for name, pairs in answers.items()
        for row, answer in pairs
    ]


def chat_prompts(models_: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Iterable[dict[str, Any]]:
    kept = 0
    for messages in recipes.CONVERSATIONS:
        rendered = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        try:
            [(prompt, answers)] = clear_ones(models_, [ids], 1, "chat")
        except AssertionError:
            continue
        yield {"group": "chat", "token_ids": prompt, "messages": list(messages), "answers": answers}
        kept += 1
        if kept == recipes.CONVERSATIONS_KEPT:
            return
    raise AssertionError("too few conversations have clear answers")


def build(root: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(root / recipes.BASE_NAME)
    base = build_model(root / recipes.BASE_NAME, tokenizer)
    alphabet = printable_ids(tokenizer)
    models_: dict[str, Any] = {"base": base}
    for recipe in (*recipes.CASES, *recipes.GENERATIONS):
        build_adapter(peft_model(base, recipe), recipe, root / "adapters" / recipe.name)
        models_[recipe.name] = with_adapter(base, root / "adapters" / recipe.name)
    prompts: list[dict[str, Any]] = []
    for number, plan in enumerate(recipes.PROMPTS):
        for prompt, answers in clear_ones(models_, candidates(plan, alphabet, number), plan.count, plan.group):
            prompts.append({"group": plan.group, "token_ids": prompt, "messages": None, "answers": answers})
    generations = {recipe.name: models_[recipe.name] for recipe in recipes.GENERATIONS}
    for entry in prompts:
        if entry["group"] == "long":
            check_stale_cache_shows(generations, entry["token_ids"], entry["answers"])
    prompts.extend(chat_prompts(models_, tokenizer))
    prompts.extend(build_fleet(base, root / "adapters", alphabet))
    for entry in prompts:
        entry["texts"] = {name: tokenizer.decode(answer) for name, answer in entry["answers"].items()}
    (root / "references.json").write_text(json.dumps({"prompts": prompts, "alphabet": alphabet}))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
