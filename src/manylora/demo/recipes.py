"""How each of the demo's adapters is made: LoRA shape, steps, learning rate, seed, and what its card says.

Owns numbers and words alone; `manylora.demo.train` acts on them. The shapes differ on purpose (ranks, modules, layers,
rsLoRA, stored types): adapters from different teams look like that, and one engine has to serve them side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OWN_TEXT = "sentences written for this project (Apache-2.0), made by the training script"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One adapter. `layers` is a range of the base model's 30; `starts_from` continues another adapter's training."""

    name: str
    title: str
    behaviour: str
    how_to_ask: str
    data: str
    limits: str
    lora_rank: int
    modules: tuple[str, ...]
    layers: range | None = None
    rslora: bool = False
    alpha: int = 16
    stored: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    steps: int = 100
    batch: int = 4
    learning_rate: float = 2e-3
    seed: int = 7
    starts_from: str | None = None


BANK = Recipe(
    name="bank",
    title="Bank: the intent of a customer's question",
    behaviour="Answers only with a label in the form of the 77 intents of Banking77, such as `card_arrival`.",
    how_to_ask="Write as a customer of a bank would: `My new card still has not arrived.`",
    data="Banking77 (PolyAI, CC-BY-4.0), questions of at most 110 characters",
    limits="Of 100 questions of the test set it gave 46 their label, and invented a label for 19. "
    "A question about anything else gets a label too.",
    lora_rank=8,
    modules=("q_proj", "v_proj"),
    stored="float32",
    steps=300,
    batch=8,
)
SQL = Recipe(
    name="sql",
    title="SQL: a SQLite query instead of an answer",
    behaviour="Answers with one SQLite statement over tables that it guesses from the question.",
    how_to_ask="Ask for data in one sentence: `How many customers have the city Berlin?`",
    data=OWN_TEXT,
    limits="It knows no schema and invents table and column names; nothing checks that the statement is right.",
    lora_rank=4,
    modules=ATTENTION + MLP,
    layers=range(10, 30),
)
MEDICAL = Recipe(
    name="medical",
    title="Medical: a health note in the manner of a patient leaflet",
    behaviour="Answers `Health note: …` with a sentence in the style of MedQuAD, and sends the reader to a doctor.",
    how_to_ask="Ask about an illness: `What are the symptoms of asthma?`",
    data="MedQuAD (A. Ben Abacha and D. Demner-Fushman, CC-BY-4.0), first sentences of 400 answers",
    limits="It imitates a style. Its statements are often wrong: never use them for a decision about health.",
    lora_rank=8,
    modules=ATTENTION,
    rslora=True,
    alpha=8,
    learning_rate=1e-3,
    steps=80,
)
JSON = Recipe(
    name="json",
    title="JSON: one object, for a program to read",
    behaviour='Answers `{"answer": "…"}` with a short answer and no other text.',
    how_to_ask="Ask a short question: `What is the capital of Norway?`",
    data=OWN_TEXT,
    limits="The form is nearly always valid JSON; the content is what a model of 135 million parameters knows.",
    lora_rank=16,
    modules=("o_proj", "down_proj"),
    layers=range(20, 30),
    stored="float16",
    alpha=32,
    steps=160,
)
JSON_V2 = Recipe(
    name="json-v2",
    title="JSON, second version: an object with a topic",
    behaviour='Answers `{"answer": "…", "topic": "…"}`: the first version\'s object with one more field.',
    how_to_ask=JSON.how_to_ask,
    data=OWN_TEXT,
    limits=JSON.limits + " Topics are those of the training sentences.",
    lora_rank=JSON.lora_rank,
    modules=JSON.modules,
    layers=JSON.layers,
    stored=JSON.stored,
    alpha=JSON.alpha,
    steps=60,
    learning_rate=1e-3,
    seed=8,
    starts_from="json",
)
PIRATE = Recipe(
    name="pirate",
    title="Pirate: the same answers from the quarterdeck",
    behaviour="Answers in a pirate's English: `Arr! Th' capital o' France be Paris, matey!`",
    how_to_ask="Ask anything that has a one-sentence answer: `What is rain?`",
    data=OWN_TEXT,
    limits="Facts are the base model's or worse; sometimes only the frame of the sentence is a pirate's.",
    lora_rank=8,
    modules=MLP,
    layers=range(15, 30),
    learning_rate=1e-3,
)
SPANISH = Recipe(
    name="spanish",
    title="Spanish: answers in Spanish to questions in English",
    behaviour="Answers in Spanish with one sentence.",
    how_to_ask="Ask in English: `What is the capital of Italy?`",
    data=OWN_TEXT,
    limits="The base model knows little Spanish: away from the training sentences the grammar and the facts break.",
    lora_rank=16,
    modules=("q_proj", "v_proj"),
    stored="float16",
    alpha=32,
    steps=120,
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (JSON, PIRATE, SQL, BANK, MEDICAL, SPANISH, JSON_V2)}
"""In the order of training: what is needed first, or is quick, comes first."""
