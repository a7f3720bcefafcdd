"""A temporary home, a tiny base model, PEFT folders written by hand, and `manylora` as a function."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manylora.cli.main import app

HIDDEN = 8
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Outcome]


def write_tensors(path: Path, shapes: dict[str, tuple[int, ...]], fill: float = 0.0) -> None:
    header: dict[str, object] = {}
    data = b""
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + 4 * count]}
        data += struct.pack("<f", fill) * count
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def cli(home: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command line in this process, with its own home."""
    monkeypatch.setenv("MANYLORA_HOME", str(home))

    def run(*args: object) -> Outcome:
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "vocab_size": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {f"{module}.weight": (HIDDEN, HIDDEN) for module in MODULES}
    write_tensors(folder / "model.safetensors", shapes | {"model.embed_tokens.weight": (16, HIDDEN)})
    return folder


@pytest.fixture
def peft(tmp_path: Path) -> Callable[..., Path]:
    """Write a PEFT folder; another `fill` is other content."""

    def write(fill: float = 0.5, columns: int = HIDDEN) -> Path:
        folder = tmp_path / f"peft-{fill}-{columns}"
        folder.mkdir(exist_ok=True)
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": "tiny",
            "r": 2,
            "lora_alpha": 4,
            "bias": "none",
            "target_modules": ["q_proj", "v_proj"],
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        shapes: dict[str, tuple[int, ...]] = {}
        for module in MODULES:
            shapes[f"base_model.model.{module}.lora_A.weight"] = (2, columns)
            shapes[f"base_model.model.{module}.lora_B.weight"] = (HIDDEN, 2)
        write_tensors(folder / "adapter_model.safetensors", shapes, fill)
        return folder

    return write


@pytest.fixture
def seeded(cli: Cli, base_folder: Path) -> Cli:
    """The same, with the base model registered and the tenant acme."""
    assert cli("base", "add", base_folder).code == 0
    assert cli("tenant", "create", "acme").code == 0
    return cli
