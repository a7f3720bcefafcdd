"""What transformers and PEFT answer, greedily and in float32: the truth that the demo holds the engine against.

Run as a process of its own beside the engine's start, so that neither PyTorch nor its threads live in the demo's
process: `python -m manylora.demo.reference FILE` reads asks as JSON from FILE and writes the answers' tokens as JSON to
stdout. Each adapter is loaded by itself from its folder, as its author would load it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ReferenceAsk:
    """A question to the base model (`adapter` is None) or to the adapter in a folder."""

    adapter: str | None
    question: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """The tokens of the answer without the one that ends it, and their text."""

    tokens: tuple[int, ...]
    text: str


def write_asks(asks: Sequence[ReferenceAsk], base: Path, path: Path) -> None:
    """Write the file that this module's process reads."""
    path.write_text(json.dumps({"base": str(base), "asks": [asdict(ask) for ask in asks]}), encoding="utf-8")


def read_answers(output: bytes) -> list[ReferenceAnswer]:
    """The answers, in the order of the asks, from what the process wrote."""
    return [ReferenceAnswer(tuple(answer["tokens"]), answer["text"]) for answer in json.loads(output)]


def answers(base: Path, asks: Sequence[ReferenceAsk]) -> Iterator[ReferenceAnswer]:
    """Answer every ask, in order."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = _with_adapters(model, sorted({ask.adapter for ask in asks if ask.adapter is not None}))
    for ask in asks:
        with torch.inference_mode():
            yield _answer(tokenizer, adapted, ask)


def _with_adapters(model: Any, folders: Sequence[str]) -> Any:
    from peft import PeftModel

    adapted = model
    for folder in folders:
        if adapted is model:
            adapted = PeftModel.from_pretrained(model, folder, adapter_name=_slot(folder))
        else:
            adapted.load_adapter(folder, adapter_name=_slot(folder))
    return adapted


def _slot(folder: str) -> str:
    """PEFT keeps adapters in module dictionaries, whose keys may hold no dot."""
    return folder.replace(".", "_")


def _answer(tokenizer: Any, model: Any, ask: ReferenceAsk) -> ReferenceAnswer:
    if ask.adapter is not None:
        model.set_adapter(_slot(ask.adapter))
        return _generate(tokenizer, model, ask)
    if not hasattr(model, "disable_adapter"):
        return _generate(tokenizer, model, ask)
    with model.disable_adapter():
        return _generate(tokenizer, model, ask)


def _generate(tokenizer: Any, model: Any, ask: ReferenceAsk) -> ReferenceAnswer:
    messages = [{"role": "user", "content": ask.question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=ask.max_tokens, do_sample=False)
    tokens = output[0, prompt["input_ids"].shape[1] :].tolist()
    if tokens[-1] == tokenizer.eos_token_id:
        tokens.pop()
    return ReferenceAnswer(tuple(tokens), tokenizer.decode(tokens, skip_special_tokens=True))


def main() -> None:
    """Answer the asks of the file named on the command line."""
    work = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    asks = [ReferenceAsk(**ask) for ask in work["asks"]]
    json.dump([asdict(answer) for answer in answers(Path(work["base"]), asks)], sys.stdout)


if __name__ == "__main__":
    main()
