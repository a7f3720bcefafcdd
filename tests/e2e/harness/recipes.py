"""What the model zoo holds, as plain data: the base model's shape, every adapter, the prompts. Knows no torch.

`build_zoo` turns these records into files and reference answers; tests read the same names through `zoo`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BASE_NAME = "tiny-llama"
VOCAB_SIZE = 512
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
FFN = 384
LAYERS = 4
MAX_POSITION = 2048
MAX_TOKENS = 20
"""Length of every reference answer."""

MIN_LOGIT_GAP = 1e-3
"""Two runs of one model in float32 differ by about 1e-5 in a logit; a winner by less than this is not a reference."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one adapter is made. `strength` is the size of the change to a weight, relative to that weight."""

    name: str
    seed: int
    lora_rank: int = 8
    alpha: float = 16
    target_modules: tuple[str, ...] | str = ("q_proj", "v_proj")
    dtype: str = "float32"
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    strength: float = 0.9


CASES: tuple[Recipe, ...] = (
    Recipe("r4", 1, lora_rank=4, alpha=8),
    Recipe("r8-fp16", 2, lora_rank=8, dtype="float16"),
    Recipe("r16-bf16", 3, lora_rank=16, alpha=16, target_modules=ATTENTION, dtype="bfloat16"),
    Recipe("r32", 4, lora_rank=32, alpha=64, target_modules=ATTENTION),
    Recipe("rslora", 5, lora_rank=16, alpha=16, use_rslora=True, target_modules=("q_proj", "o_proj", "up_proj")),
    Recipe(
        "patterns",
        6,
        lora_rank=8,
        alpha=16,
        target_modules=("q_proj", "v_proj", "o_proj"),
        rank_pattern={"q_proj": 4, "layers.2.self_attn.v_proj": 16},
        alpha_pattern={"q_proj": 32, "layers.1.self_attn.o_proj": 4},
    ),
    Recipe("q-only", 7, target_modules=("q_proj",), strength=1.6),
    Recipe("all-linear", 8, lora_rank=8, target_modules="all-linear", strength=0.5),
    Recipe("layer-subset", 9, target_modules=("q_proj", "v_proj", "down_proj"), layers=(1, 3)),
    Recipe("regex", 10, target_modules=r".*layers\.[012]\.(self_attn\.[kv]_proj|mlp\.gate_proj)", dtype="float16"),
    Recipe("mlp-only", 11, lora_rank=4, target_modules=("gate_proj", "up_proj", "down_proj"), dtype="bfloat16"),
    Recipe("wide", 12, lora_rank=32, alpha=32, target_modules="all-linear", strength=0.5),
)
"""One adapter for each thing that the format allows. `wide` is the largest: 1.4 MB, for the live push."""

GENERATIONS: tuple[Recipe, ...] = tuple(
    Recipe(f"gen{number}", 100 + number, target_modules=ATTENTION, strength=0.6) for number in range(1, 7)
)
"""New weights under one name; their answers to the long prompts tell stale KV cache from fresh."""

FLEET: tuple[Recipe, ...] = tuple(
    Recipe(
        f"fleet{number:03d}", 1000 + number, lora_rank=32, target_modules="all-linear", dtype="bfloat16", strength=0.4
    )
    for number in range(100)
)
"""Many adapters of one shape, 1.4 MB each once loaded, so that one that is never freed shows in the memory."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Prompts of `length` tokens, `count` of them, chosen among candidates so that no answer hangs on a near-tie."""

    group: str
    length: int
    count: int
    shared_prefix: int = 0


PROMPTS: tuple[PromptPlan, ...] = (
    PromptPlan("short", 9, 3),
    PromptPlan("medium", 40, 3),
    PromptPlan("long", 300, 2, shared_prefix=256),
)
FLEET_PROMPT = PromptPlan("fleet", 24, 1)
FLEET_MAX_TOKENS = 10

CONVERSATIONS: tuple[tuple[dict[str, str], ...], ...] = tuple(
    ({"role": "system", "content": f"You are number {number}."}, {"role": "user", "content": text})
    for number, text in enumerate(
        (
            "What is the capital of France?",
            "Say something about otters.",
            "2 + 2 = ?",
            "Write a table of months.",
            "Tell me a joke, please!",
            "Who wrote this song?",
            "List three colours.",
            "How old is the moon?",
            "Translate: good morning.",
            "Is it raining in Oslo?",
            "Name a river; any river.",
            "Explain tides to a child.",
        )
    )
)
"""Candidates; the builder keeps the first few whose answers are clear."""
CONVERSATIONS_KEPT = 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
