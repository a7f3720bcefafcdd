"""Base models and PEFT folders made from nothing: a few bytes of safetensors written by hand, without torch."""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from manylora.adapter import AdapterName
from manylora.registry.base_model import BaseModel, describe
from manylora.registry.catalog import Catalog
from manylora.settings import Settings

HIDDEN, INNER, KV, VOCABULARY, LAYERS = 16, 32, 8, 40, 2
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}

Shapes = Mapping[str, tuple[int, ...]]


def safetensors_bytes(shapes: Shapes, *, dtype: str = "F32", fill: int = 1) -> bytes:
    """A sound safetensors file whose every number is small and finite, different for each `fill`."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        begin = len(data)
        data += _numbers(dtype, count, fill)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, len(data)]}
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


def _numbers(dtype: str, count: int, fill: int) -> bytes:
    values = [((i * 7 + fill) % 19 - 9) / 16 for i in range(count)]
    packed = struct.pack(f"<{count}f", *values)
    if dtype == "F32":
        return packed
    if dtype == "F16":
        return struct.pack(f"<{count}e", *values)
    return b"".join(packed[i + 2 : i + 4] for i in range(0, len(packed), 4))


def lora_shapes(modules: Mapping[str, tuple[int, int]], ranks: Callable[[str], int]) -> dict[str, tuple[int, ...]]:
    """The tensors of a LoRA adapter on these modules (path to out, in)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, (rows, columns) in modules.items():
        shapes[f"base_model.model.{path}.lora_A.weight"] = (ranks(path), columns)
        shapes[f"base_model.model.{path}.lora_B.weight"] = (rows, ranks(path))
    return shapes


def layer_modules(*names: str, layers: Sequence[int] = range(LAYERS)) -> dict[str, tuple[int, int]]:
    """The full paths of modules given by the end of their names, and their shapes."""
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in layers
        for name, shape in SHAPES.items()
        if name.rpartition(".")[2] in names
    }


def write_adapter(
    folder: Path,
    *,
    modules: Mapping[str, tuple[int, int]] | None = None,
    lora_rank: int = 4,
    ranks: Mapping[str, int] | None = None,
    extra: Shapes | None = None,
    drop: Sequence[str] = (),
    dtype: str = "F32",
    fill: int = 1,
    **config: Any,
) -> Path:
    """A PEFT folder. `config` overrides fields; `extra` adds tensors and `drop` leaves some out."""
    modules = layer_modules("q_proj", "v_proj") if modules is None else modules
    shapes = lora_shapes(modules, lambda path: (ranks or {}).get(path, lora_rank)) | dict(extra or {})
    for name in drop:
        del shapes[name]
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-base",
        "revision": None,
        "r": lora_rank,
        "lora_alpha": 8,
        "bias": "none",
        "target_modules": sorted({path.rpartition(".")[2] for path in modules}),
        "lora_dropout": 0.05,
        "inference_mode": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(shapes, dtype=dtype, fill=fill))
    return folder


def base_shapes(*, tied: bool = True) -> dict[str, tuple[int, ...]]:
    """The tensors of a tiny Llama."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for path, shape in layer_modules(*(name.rpartition(".")[2] for name in SHAPES)).items():
        shapes[f"{path}.weight"] = shape
    for layer in range(LAYERS):
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
    return shapes if tied else shapes | {"lm_head.weight": (VOCABULARY, HIDDEN)}


BASE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE_CONFIG))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(base_shapes(), dtype="BF16"))
    return folder


@pytest.fixture
def base(base_folder: Path) -> BaseModel:
    return describe(base_folder)


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """A home of its own, on SQLite; or on PostgreSQL where MANYLORA_TEST_POSTGRES_URL names a server."""
    server = os.environ.get("MANYLORA_TEST_POSTGRES_URL", "")
    with fresh_schema(server) if server else nullcontext("") as url:
        yield Settings.from_env({"MANYLORA_HOME": str(tmp_path / "home"), "MANYLORA_DATABASE_URL": url})


@contextmanager
def fresh_schema(server: str) -> Iterator[str]:
    """The URL of a new, empty schema on a PostgreSQL server."""
    name = f"test_{secrets.token_hex(6)}"
    engine = create_engine(server)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    yield make_url(server).update_query_dict({"options": f"-csearch_path={name}"}).render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
    engine.dispose()


@pytest.fixture
def catalog(settings: Settings, base: BaseModel) -> Iterator[Catalog]:
    """An open registry with the base model and the tenants acme and globex."""
    with Catalog.open(settings) as opened:
        opened.register_base_model(base, actor="test")
        opened.create_tenant("acme", actor="test")
        opened.create_tenant("globex", actor="test")
        yield opened


@pytest.fixture
def support() -> AdapterName:
    return AdapterName("acme", "support")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """`make(fill=…, …)` writes a PEFT folder of its own, see `write_adapter`."""
    count = iter(range(1_000_000))

    def build(**options: Any) -> Path:
        return write_adapter(tmp_path / f"adapter-{next(count)}", **options)

    return build


@pytest.fixture
def tensors() -> Callable[..., bytes]:
    return safetensors_bytes


@pytest.fixture
def modules_of() -> Callable[..., dict[str, tuple[int, int]]]:
    return layer_modules


@pytest.fixture
def base_tensors() -> Callable[..., dict[str, tuple[int, ...]]]:
    return base_shapes


@pytest.fixture
def base_config() -> dict[str, Any]:
    return dict(BASE_CONFIG)
