from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manylora.adapter import AdapterName
from manylora.errors import InvalidAdapter
from manylora.registry.base_copies import check_base_copies
from manylora.registry.base_model import BaseModel, describe
from manylora.registry.catalog import Catalog
from manylora.registry.peft_format import read_peft_folder

PREFIX = "base_model.model."
EMBED = "model.embed_tokens"
COPIES = {f"{PREFIX}{EMBED}.base_layer.weight": (40, 16), f"{PREFIX}lm_head.base_layer.weight": (40, 16)}
LORA = {f"{PREFIX}lm_head.lora_A.weight": (4, 16), f"{PREFIX}lm_head.lora_B.weight": (40, 4)}
Make = Callable[..., Path]


def put_tensor(file: Path, name: str, data: bytes) -> None:
    """Overwrite a tensor's bytes in a safetensors file."""
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    begin, end = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    assert end - begin == len(data), (end - begin, len(data))
    content[8 + length + begin : 8 + length + end] = data
    file.write_bytes(content)


def tensor(file: Path, name: str) -> bytes:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    begin, end = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    return content[8 + length + begin : 8 + length + end]


def widened(data: bytes) -> bytes:
    """bfloat16 as float32."""
    return b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))


@pytest.fixture
def with_copies(make: Make, base_folder: Path) -> Callable[..., Path]:
    """A PEFT folder with copies of the base model's embeddings (tied), as they are; or with one number changed."""

    def build(dtype: str, *, changed: str = "") -> Path:
        folder = make(dtype=dtype, extra=COPIES | LORA, target_modules="all-linear")
        original = tensor(base_folder / "model.safetensors", f"{EMBED}.weight")
        data = widened(original) if dtype == "F32" else original
        for name in COPIES:
            content = bytearray(data)
            if changed and changed in name:
                content[-2] ^= 1
            put_tensor(folder / "adapter_model.safetensors", name, bytes(content))
        return folder

    return build


def check(folder: Path, base: BaseModel) -> list[str]:
    return check_base_copies(read_peft_folder(folder, max_bytes=1 << 20), base)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_copies_of_the_base_models_own_weights(with_copies: Callable[..., Path], base: BaseModel, dtype: str) -> None:
    assert check(with_copies(dtype), base) == []


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("changed", ["lm_head", "embed_tokens"])
def test_a_changed_copy_is_refused(with_copies: Callable[..., Path], base: BaseModel, dtype: str, changed: str) -> None:
    with pytest.raises(InvalidAdapter, match=f"{changed}.base_layer.weight' is not that weight of tiny-base") as caught:
        check(with_copies(dtype, changed=changed), base)
    assert "base of its own" in caught.value.hint


def test_an_untied_head_is_compared_with_itself(
    with_copies: Callable[..., Path], base_folder: Path, tensors: Any, base_tensors: Any
) -> None:
    (base_folder / "model.safetensors").write_bytes(tensors(base_tensors(tied=False), dtype="BF16", fill=3))
    put_tensor(base_folder / "model.safetensors", "lm_head.weight", b"\0" * 1280)
    with pytest.raises(InvalidAdapter, match="lm_head"):
        check(with_copies("BF16"), describe(base_folder))


def test_what_cannot_be_compared_is_a_warning(with_copies: Callable[..., Path], make: Make, base: BaseModel) -> None:
    folder = with_copies("BF16")
    for warnings in (
        check(folder, replace(base, source="/nowhere")),
        check(folder, replace(base, revision="0123")),
        check(make(dtype="F16", extra=COPIES | LORA, target_modules="all-linear"), base),
    ):
        assert len(warnings) == 2
        assert "cannot be compared" in warnings[0]
        assert "own weight will be used" in warnings[0]


def test_an_adapter_without_copies_needs_no_file(make: Make, base: BaseModel) -> None:
    assert check(make(), replace(base, source="/nowhere")) == []


def test_a_push_stops_at_a_warning_and_can_be_forced(
    with_copies: Callable[..., Path], catalog: Catalog, base: BaseModel, support: AdapterName, base_folder: Path
) -> None:
    folder = with_copies("F32")
    base_folder.rename(base_folder.with_name("gone"))
    with pytest.raises(InvalidAdapter, match="cannot be compared") as caught:
        catalog.publish(folder, support, base_model=base.name, actor="me")
    assert "--force" in caught.value.hint
    assert len(catalog.publish(folder, support, base_model=base.name, actor="me", force=True).warnings) == 2
