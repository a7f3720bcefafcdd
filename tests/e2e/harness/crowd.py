"""Many versions of few weights: each has a digest of its own and the answers of the adapter that it was made from."""

from __future__ import annotations

import json
import os
from pathlib import Path

from harness.zoo import Zoo


def variant(zoo: Zoo, recipe: str, number: int, folder: Path) -> Path:
    """The zoo's adapter with another dropout, which serving ignores and the digest does not; made in `folder`."""
    source, made = zoo.adapter(recipe), folder / f"{recipe}-{number}"
    made.mkdir(parents=True)
    config = json.loads((source / "adapter_config.json").read_text())
    (made / "adapter_config.json").write_text(json.dumps({**config, "lora_dropout": (1 + number) / 1e6}))
    os.link(source / "adapter_model.safetensors", made / "adapter_model.safetensors")
    return made
