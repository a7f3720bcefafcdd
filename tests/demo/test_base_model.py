"""Conversion of the GGUF file: names, row orders, and a folder that is whole or absent."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from manylora.demo import base_model
from manylora.errors import Unavailable

FIELDS: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 100000.0,
    "llama.vocab_size": 6,
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"],
    "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{{ messages }}",
}
TENSORS = {
    "token_embd": (6, 64),
    "output_norm": (64,),
    "blk.0.attn_norm": (64,),
    "blk.0.ffn_norm": (64,),
    "blk.0.attn_q": (64, 64),
    "blk.0.attn_k": (32, 64),
    "blk.0.attn_v": (32, 64),
    "blk.0.attn_output": (64, 64),
    "blk.0.ffn_gate": (96, 64),
    "blk.0.ffn_up": (96, 64),
    "blk.0.ffn_down": (64, 96),
}


@pytest.mark.parametrize(
    ("gguf_name", "hf_name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("blk.12.ffn_norm.weight", "model.layers.12.post_attention_layernorm.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_names(gguf_name: str, hf_name: str) -> None:
    assert base_model.hf_name(gguf_name) == hf_name


def test_unpermute_undoes_llama_cpps_order() -> None:
    numpy = pytest.importorskip("numpy")
    heads, head_dim, width = 3, 8, 5
    original = numpy.arange(heads * head_dim * width).reshape(heads * head_dim, width)
    # The permutation of llama.cpp's own converter.
    stored = original.reshape(heads, 2, head_dim // 2, width).swapaxes(1, 2).reshape(original.shape)
    assert not (stored == original).all()
    assert (base_model.unpermute(stored, heads) == original).all()


def test_unpermute_pairs_halves_of_a_head() -> None:
    numpy = pytest.importorskip("numpy")
    stored = numpy.array([0, 2, 1, 3, 10, 12, 11, 13])[:, None]
    assert base_model.unpermute(stored, 2)[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_config_is_llamas() -> None:
    config = base_model.model_config(FIELDS)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 32
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert base_model.generation_config(FIELDS) == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_another_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF, but another one")
    with pytest.raises(Unavailable, match=r"wrong\.gguf has SHA-256"):
        base_model.convert(wrong, tmp_path / "models" / "folder")
    assert not (tmp_path / "models").exists()


def test_a_failing_conversion_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no GGUF at all")
    with pytest.raises(ValueError, match="magic"):
        base_model.convert(broken, tmp_path / "models" / "folder", sha256=_sha256(broken))
    assert list((tmp_path / "models").iterdir()) == []


def test_an_existing_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / base_model.FOLDER).mkdir()
    assert base_model.ensure(tmp_path) == tmp_path / base_model.FOLDER


def test_a_missing_package_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "GGUF_PACKAGE", "no_such_package")
    with pytest.raises(Unavailable, match="needs the package no-such-package") as caught:
        base_model.ensure(tmp_path)
    assert "pip install" in caught.value.hint


def test_converts_a_small_file(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("gguf")
    safetensors = pytest.importorskip("safetensors.torch")
    values = _write_gguf(tmp_path / "tiny.gguf", numpy)
    folder = tmp_path / "models" / "tiny"
    base_model.convert(tmp_path / "tiny.gguf", folder, sha256=_sha256(tmp_path / "tiny.gguf"))
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    weights = safetensors.load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        base_model.hf_name(f"{name}.weight"): shape for name, shape in TENSORS.items()
    }
    value = weights["model.layers.0.mlp.up_proj.weight"].float().numpy()
    assert numpy.abs(value - values["blk.0.ffn_up"]).max() < 0.02  # 8-bit blocks, then bfloat16
    q = weights["model.layers.0.self_attn.q_proj.weight"].float().numpy()
    assert numpy.abs(q - base_model.unpermute(values["blk.0.attn_q"], 2)).max() < 0.02
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert json.loads((folder / "tokenizer.json").read_text())["added_tokens"][2]["content"] == "<|im_end|>"


def _write_gguf(path: Path, numpy: Any) -> dict[str, Any]:
    import gguf
    from gguf.quants import quantize

    random = numpy.random.default_rng(0)
    values = {name: random.uniform(-1, 1, shape).astype(numpy.float32) for name, shape in TENSORS.items()}
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in FIELDS.items():
        _add_field(writer, name, value)
    for name, value in values.items():
        kind = gguf.GGMLQuantizationType.F32 if value.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _add_field(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_uint32(name, value)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
