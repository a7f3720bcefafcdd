"""The model zoo as tests see it: folders of the base and of every adapter, prompts, and PEFT's answers to them.

Built once per change of its recipes, by a process of its own, into pytest's cache; then only read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BASE = "base"
"""Key of the base model's own answers."""

_SOURCES = ("recipes.py", "build_zoo.py")
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, or as a conversation (then the ids are what the chat template makes of it)."""

    group: str
    token_ids: tuple[int, ...]
    messages: tuple[dict[str, str], ...] | None
    answers: Mapping[str, tuple[int, ...]]
    texts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Zoo:
    """A built zoo. Its files are never written to; a test that wants a damaged adapter copies one."""

    root: Path
    base_path: Path
    prompts: tuple[Prompt, ...]
    alphabet: tuple[int, ...]
    """Token ids that are plain text: the stuff of prompts."""

    def adapter(self, name: str) -> Path:
        """The PEFT folder of the adapter that a recipe calls `name`."""
        return self.root / "adapters" / name

    def group(self, *groups: str) -> list[Prompt]:
        """The prompts of these groups, in a fixed order."""
        return [prompt for prompt in self.prompts if prompt.group in groups]

    def fleet_prompt(self, name: str) -> Prompt:
        """A prompt that the fleet's adapter `name` answers clearly."""
        return next(prompt for prompt in self.group("fleet") if name in prompt.answers)


def open_zoo(cache: Path) -> Zoo:
    """The zoo of the present recipes, from `cache` or built into it."""
    root = cache / _sources_hash()
    if not (root / "references.json").exists():
        _build(root)
    read = json.loads((root / "references.json").read_text())
    return Zoo(root, root / "tiny-llama", tuple(map(_prompt, read["prompts"])), tuple(read["alphabet"]))


def _sources_hash() -> str:
    joined = b"\0".join((_HERE / source).read_bytes() for source in _SOURCES)
    return hashlib.sha256(joined).hexdigest()[:16]


def _build(root: Path) -> None:
    """Build beside and rename, so that a run that was killed leaves no half zoo; older zoos are deleted."""
    for old in root.parent.iterdir():
        shutil.rmtree(old)
    partial = root.with_name("partial")
    partial.mkdir(parents=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(_HERE / "build_zoo.py"), str(partial)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the model zoo could not be built:\n{done.stderr[-3000:]}"
    partial.rename(root)


def _prompt(read: dict[str, object]) -> Prompt:
    messages = read["messages"]
    return Prompt(
        group=str(read["group"]),
        token_ids=tuple(read["token_ids"]),  # type: ignore[arg-type]
        messages=tuple(messages) if messages else None,  # type: ignore[arg-type]
        answers={name: tuple(answer) for name, answer in read["answers"].items()},  # type: ignore[attr-defined]
        texts=dict(read["texts"]),  # type: ignore[call-overload]
    )
