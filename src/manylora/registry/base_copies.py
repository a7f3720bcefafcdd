"""Copies of the base model's own weights in an adapter's file: are they the base model's?

PEFT saves `embed_tokens` and `lm_head` along with LoRA on them, and its loading puts the copy in the base weight's
place. The engine keeps its own weights, so a copy may be left out of account only where it is the same. That is told
from the base model's files, where they are on this machine, byte by byte and without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from manylora.adapter import shown
from manylora.errors import InvalidAdapter
from manylora.peft_config import WEIGHTS_FILE
from manylora.registry.base_model import EMBEDDING, LM_HEAD, BaseModel, StoredTensor, find_weights
from manylora.registry.peft_format import PeftAdapter
from manylora.registry.safetensors_header import DTYPE_BITS
from manylora.registry.untrusted_files import open_plain

_CHUNK_ELEMENTS = 1 << 16


def check_base_copies(adapter: PeftAdapter, base: BaseModel) -> list[str]:
    """Warnings about copies that cannot be compared; `InvalidAdapter` for one that is not the base model's weight."""
    if not adapter.base_copies:
        return []
    stored = find_weights(base, {*adapter.base_copies, _embedding(base)})
    unknown = []
    for path, tensor in adapter.base_copies.items():
        original = stored.get(path) or (stored.get(_embedding(base)) if path == LM_HEAD else None)  # tied: stored once
        copy = StoredTensor(adapter.weights, adapter.header.data_offset + tensor.begin, tensor.dtype, tensor.shape)
        if original is None or not _comparable(copy, original):
            unknown.append(path)
        elif not _same(copy, original):
            raise InvalidAdapter(
                f"{WEIGHTS_FILE}: '{shown(path, 160)}.base_layer.weight' is not that weight of {base.name}:"
                " it was changed in training, and an adapter cannot carry it",
                "choose the base model that it was trained on, or serve the changed model as a base of its own",
            )
    return [_warning(path, base) for path in unknown]


def _warning(path: str, base: BaseModel) -> str:
    return (
        f"{WEIGHTS_FILE}: '{shown(path, 160)}.base_layer.weight' is a copy of a base weight that cannot be compared:"
        f" {base.name}'s files are not on this machine, or of another type; {base.name}'s own weight will be used"
    )


def _embedding(base: BaseModel) -> str:
    return next((path for path in base.modules if path.rpartition(".")[2] == EMBEDDING), "")


def _comparable(copy: StoredTensor, original: StoredTensor) -> bool:
    """The same type; or float32, to which a bfloat16 model was widened for training."""
    same = copy.dtype == original.dtype or (copy.dtype, original.dtype) == ("F32", "BF16")
    return same and copy.shape == original.shape


def _same(copy: StoredTensor, original: StoredTensor) -> bool:
    widened = copy.dtype != original.dtype
    pairs = zip(_chunks(copy), _chunks(original), strict=True)
    return all(_narrowed(ours) == theirs if widened else ours == theirs for ours, theirs in pairs)


def _narrowed(chunk: bytes) -> bytes | None:
    """The bfloat16 numbers that float32 numbers were widened from, or None where they were not."""
    if any(chunk[0::4]) or any(chunk[1::4]):
        return None
    narrow = bytearray(len(chunk) // 2)
    narrow[0::2], narrow[1::2] = chunk[2::4], chunk[3::4]
    return bytes(narrow)


def _chunks(tensor: StoredTensor) -> Iterator[bytes]:
    """The tensor's bytes, as many numbers at a time whatever their type."""
    elements = math.prod(tensor.shape)
    width = DTYPE_BITS[tensor.dtype] // 8
    with open_plain(tensor.file, follow_links=True) as file:
        file.seek(tensor.offset)
        for begin in range(0, elements, _CHUNK_ELEMENTS):
            yield file.read(width * min(_CHUNK_ELEMENTS, elements - begin))
