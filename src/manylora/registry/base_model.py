"""What a base model consists of: the linear and embedding modules that an adapter may change, and their shapes.

The headers of its safetensors files are the truth; where the weights are quantised or absent, the shapes of
Llama-like architectures follow from `config.json`. Nothing is fetched: a hub id is looked up in the local cache.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from manylora.adapter import shown
from manylora.errors import InvalidAdapter, InvalidInput
from manylora.registry.safetensors_header import DTYPE_BITS, Limits, TensorInfo, read_header
from manylora.registry.strict_json import parse_object
from manylora.registry.untrusted_files import is_folder

EMBEDDING = "embed_tokens"
LM_HEAD = "lm_head"
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_MAX_JSON_BYTES = 256 << 20
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
_WIDE = Limits(
    max_file_bytes=1 << 50,
    max_header_bytes=100_000_000,
    max_tensors=2_000_000,
    max_dims=8,
    dtypes=frozenset(DTYPE_BITS),
    follow_links=True,
)
# Architectures with the module names and shapes of Llama.
_LLAMA_LIKE = frozenset(
    {"gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo", "olmo2", "qwen2", "qwen3", "smollm3"}
)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model as adapters are checked against it."""

    name: str
    config: Mapping[str, object]
    modules: Mapping[str, tuple[int, int]]
    """Full module path, such as "model.layers.0.self_attn.q_proj", to the shape of its weight: (out, in) features."""
    revision: str | None
    vocab_size: int
    source: str
    """The folder or hub id that this was read from."""
    aliases: tuple[str, ...] = ()
    """Other names under which adapters may call the same base model."""


def describe(
    model: str | Path, *, name: str | None = None, cache: Path | None = None, aliases: tuple[str, ...] = ()
) -> BaseModel:
    """Read a base model's shapes from a local Hugging Face folder, or from the hub's local cache.

    It is called `name`, else the hub id, else the folder's name.
    """
    folder = _folder(model, cache)
    config = _read_json(folder / "config.json")
    modules = _modules(folder, config)
    hub_id, revision = _hub_identity(folder)
    return BaseModel(
        name=name or hub_id or folder.name,
        config=config,
        modules=modules,
        revision=revision,
        vocab_size=_vocab_size(config, modules),
        source=str(Path(model).expanduser().absolute()) if is_folder(Path(model).expanduser()) else str(model),
        aliases=aliases,
    )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes lie."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


def find_weights(base: BaseModel, modules: Collection[str]) -> dict[str, StoredTensor]:
    """The weights of these modules in a base model's files; those that are not on this machine are left out."""
    try:
        folder = _folder(base.source, None)
        if _hub_identity(folder)[1] != base.revision:
            return {}  # the cache holds another commit by now
        wanted = {f"{module}.weight": module for module in modules}
        return {
            wanted[tensor.name]: StoredTensor(file, header.data_offset + tensor.begin, tensor.dtype, tensor.shape)
            for file in _weight_files(folder)
            for header in [read_header(file, _WIDE)]
            for tensor in header.tensors
            if tensor.name in wanted
        }
    except (InvalidInput, InvalidAdapter):
        return {}


def _folder(model: str | Path, cache: Path | None) -> Path:
    """The real folder of a base model that was given as a folder or hub id."""
    folder = Path(model).expanduser()
    if not is_folder(folder):
        folder = _cached_snapshot(str(model), cache or _default_cache())
    return folder.resolve()


def _default_cache() -> Path:
    try:
        from huggingface_hub.constants import HF_HUB_CACHE  # knows the user's settings; comes with the engine
    except ImportError:
        return Path.home() / ".cache" / "huggingface" / "hub"
    return Path(HF_HUB_CACHE)


def _cached_snapshot(model: str, cache: Path) -> Path:
    """The newest snapshot of a hub id in the local cache."""
    if not _HUB_ID.fullmatch(model) or ".." in model:
        raise InvalidInput(f"the base model '{shown(model, 200)}' is neither a folder nor a hub id", "check the path")
    repo = cache / f"models--{model.replace('/', '--')}"
    ref = repo / "refs" / "main"
    if ref.is_file():
        snapshot = repo / "snapshots" / ref.read_text().strip()
        if snapshot.is_dir():
            return snapshot
    snapshots = list((repo / "snapshots").glob("*")) if (repo / "snapshots").is_dir() else []
    if len(snapshots) != 1:
        raise InvalidInput(
            f"the base model '{shown(model)}' is not in the local cache {cache}",
            f"give its folder, or fetch it first: hf download {shown(model)}",
        )
    return snapshots[0]


def _hub_identity(folder: Path) -> tuple[str | None, str | None]:
    """The hub id and commit, where `folder` is a snapshot in a hub cache."""
    repo = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repo.startswith("models--"):
        return None, None
    return repo.removeprefix("models--").replace("--", "/", 1), folder.name


def _read_json(path: Path) -> dict[str, object]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise InvalidInput(f"{path} is too large", "check the base model's folder")
        return parse_object(path.read_bytes(), path.name)
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read: {error.strerror}", "give the folder of a Hugging Face model"
        ) from error
    except InvalidAdapter as error:
        raise InvalidInput(error.message, "check the base model's folder") from error


def _modules(folder: Path, config: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    found = {} if "quantization_config" in config else _from_headers(folder)
    if not found and config.get("model_type") in _LLAMA_LIKE:
        found = _from_config(config)
    if not found:
        found = _from_headers(folder)
    if not found:
        raise InvalidInput(
            f"the shapes of {folder} cannot be told: no usable safetensors, and config.json is of an unknown kind",
            "give a folder with the model's safetensors files",
        )
    embedding = next((shape for path, shape in found.items() if path.rpartition(".")[2] == EMBEDDING), None)
    if embedding is not None and LM_HEAD not in found:
        found[LM_HEAD] = embedding  # tied: the weights are stored once
    return found


def _from_headers(folder: Path) -> dict[str, tuple[int, int]]:
    try:
        tensors = [tensor for file in _weight_files(folder) for tensor in read_header(file, _WIDE).tensors]
    except InvalidAdapter as error:
        raise InvalidInput(f"base model {folder.name}: {error.message}", "check the base model's files") from error
    return dict(shape for tensor in tensors if (shape := _matrix(tensor)))


def _matrix(tensor: TensorInfo) -> tuple[str, tuple[int, int]] | None:
    if tensor.name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in _FLOATS:
        return tensor.name.removesuffix(".weight"), (tensor.shape[0], tensor.shape[1])
    return None


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InvalidInput(f"{index} has no weight_map", "check the base model's folder")
        return [folder / Path(name).name for name in sorted(set(weight_map.values()))]
    return [file for file in [folder / "model.safetensors"] if file.is_file()]


def _from_config(config: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    hidden, inner = _size(config, "hidden_size"), _size(config, "intermediate_size")
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head = _size(config, "head_dim", hidden // heads)
    shapes = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv_heads * head, hidden),
        "self_attn.v_proj": (kv_heads * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = range(_size(config, "num_hidden_layers"))
    modules = {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in shapes.items()}
    vocabulary = _size(config, "vocab_size")
    return modules | {f"model.{EMBEDDING}": (vocabulary, hidden), LM_HEAD: (vocabulary, hidden)}


def _size(config: Mapping[str, object], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value < 1 << 31:
        raise InvalidInput(f"the base model's config.json lacks a usable {field}", "check the base model's folder")
    return value


def _vocab_size(config: Mapping[str, object], modules: Mapping[str, tuple[int, int]]) -> int:
    value = config.get("vocab_size")
    if type(value) is int and value > 0:
        return value
    return next((shape[0] for path, shape in modules.items() if path.rpartition(".")[2] == EMBEDDING), 0)
