from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.errors import InvalidAdapter
from manylora.registry.finite import CHUNK_BYTES, _any_refused, check_finite
from manylora.registry.safetensors_header import read_header

WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}
NOT_FINITE = {
    "F32": [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF],
    "F16": [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF],
    "BF16": [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF],
}
JUST_BELOW = {"F32": 0x457FFFFF, "F16": 0x6BFF, "BF16": 0x457F}
"""The largest number below 4096 in each type."""


@pytest.mark.parametrize("dtype", sorted(WIDTHS))
def test_finds_every_kind_wherever_it_is(tmp_path: Path, tensors: Callable[..., bytes], dtype: str) -> None:
    width = WIDTHS[dtype]
    count = CHUNK_BYTES // width + 5  # the last elements lie in a second, short chunk
    sound = tensors({"a": (count,), "b": (3,)}, dtype=dtype)
    path = tmp_path / "x.safetensors"
    path.write_bytes(sound)
    header = read_header(path)
    check_finite(path, header)
    for bits in NOT_FINITE[dtype]:
        for index in (0, 1, count - 6, count - 5, count - 1):
            at = header.data_offset + index * width
            path.write_bytes(sound[:at] + bits.to_bytes(width, "little") + sound[at + width :])
            with pytest.raises(InvalidAdapter, match=f"tensor 'a' holds .* at element {index} "):
                check_finite(path, header)


def test_tells_nan_from_infinity(tmp_path: Path, tensors: Callable[..., bytes]) -> None:
    path = tmp_path / "x.safetensors"
    sound = tensors({"a": (2,)})
    for value, word in ((float("nan"), "a NaN"), (float("-inf"), "an infinity")):
        path.write_bytes(sound[:-4] + struct.pack("<f", value))
        with pytest.raises(InvalidAdapter, match=f"holds {word} at element 1"):
            check_finite(path, read_header(path))


@given(words=st.lists(st.integers(0, 0xFFFF), max_size=40))
def test_agrees_with_the_definition(words: list[int]) -> None:
    chunk = struct.pack(f"<{len(words)}H", *words)
    halves = struct.unpack(f"<{len(words)}e", chunk)
    brains = [struct.unpack("<f", struct.pack("<HH", 0, word))[0] for word in words]
    assert _any_refused(chunk, "F16") == any(not abs(value) < 4096 for value in halves)
    assert _any_refused(chunk, "BF16") == any(not abs(value) < 4096 for value in brains)


@pytest.mark.parametrize("dtype", sorted(WIDTHS))
def test_the_limit_is_exact(dtype: str) -> None:
    width = WIDTHS[dtype]
    sign = 1 << (8 * width - 1)
    below = (JUST_BELOW[dtype] | sign).to_bytes(width, "little")
    assert not _any_refused(below * 1000, dtype)
    assert _any_refused(below * 999 + ((JUST_BELOW[dtype] + 1) | sign).to_bytes(width, "little"), dtype)


def test_names_an_absurdly_large_number(tmp_path: Path, tensors: Callable[..., bytes]) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(tensors({"a": (2,)})[:-4] + struct.pack("<f", 3e38))
    with pytest.raises(InvalidAdapter, match="a number beyond ±4096 at element 1"):
        check_finite(path, read_header(path))


def test_a_file_that_shrinks_meanwhile_is_refused(tmp_path: Path, tensors: Callable[..., bytes]) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(tensors({"a": (20,)}))
    header = read_header(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InvalidAdapter, match="shorter"):
        check_finite(path, header)
