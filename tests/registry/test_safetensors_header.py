from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.errors import InvalidAdapter
from manylora.registry.safetensors_header import Header, Limits, parse_header, read_header

WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def parse(entries: Any, data_bytes: int = 8, limits: Limits | None = None) -> Header:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return parse_header(text, 8 + len(text) + data_bytes, "f", limits or Limits())


def refused(entries: Any, words: str, data_bytes: int = 8, limits: Limits | None = None) -> None:
    with pytest.raises(InvalidAdapter, match=words) as caught:
        parse(entries, data_bytes, limits)
    assert caught.value.hint


def test_reads_a_sound_file(tmp_path: Path, tensors: Callable[..., bytes]) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(tensors({"a": (2, 3), "b": (4,)}, dtype="F16"))
    header = read_header(path)
    assert [(t.name, t.dtype, t.shape, t.begin, t.end) for t in header.tensors] == [
        ("a", "F16", (2, 3), 0, 12),
        ("b", "F16", (4,), 12, 20),
    ]
    assert header.metadata == {"format": "pt"}
    assert header.data_offset + 20 == header.file_bytes == path.stat().st_size


def test_a_file_without_tensors_is_sound() -> None:
    assert parse({}, 0).tensors == ()


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    header = parse({"b": entry(offsets=(8, 16)), "a": entry()}, 16)
    assert [tensor.name for tensor in header.tensors] == ["a", "b"]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"a": entry(), "b": entry()}, "overlaps"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, "overlaps"),
        ({"a": entry(offsets=(4, 12))}, "gap"),
        ({"a": entry(shape=(4,), offsets=(0, 16))}, "cut off"),
        ({"a": entry(shape=(1,), offsets=(0, 4))}, "after its last tensor"),
        ({"a": entry(shape=(3,))}, "does not take 8 bytes"),
        ({"a": entry(shape=(-2,))}, "shape is not"),
        ({"a": entry(shape=(True, 2))}, "shape is not"),
        ({"a": entry(shape=(2.0,))}, "shape is not"),
        ({"a": entry(shape=(1 << 60,))}, "shape is not"),
        ({"a": entry(shape=(1, 1, 1, 1, 2))}, "dimensions"),
        ({"a": {**entry(), "shape": None}}, "shape is not"),
        ({"a": entry(offsets=(8, 0))}, "data_offsets"),
        ({"a": entry(offsets=(-8, 0))}, "data_offsets"),
        ({"a": entry(offsets=(0, 4, 8))}, "data_offsets"),
        ({"a": entry("I8", (8,))}, "type 'I8'"),
        ({"a": entry("F64", (1,))}, "type 'F64'"),
        ({"a": {**entry(), "dtype": ["F32"]}}, "type"),
        ({"a": {**entry(), "extra": 1}}, "exactly"),
        ({"a": {"dtype": "F32"}}, "exactly"),
        ({"a": 7}, "exactly"),
        ({"": entry()}, "name"),
        ({"a\nb": entry()}, "name"),
        ({"ä": entry()}, "name"),
        ({"x" * 600: entry()}, "name"),
        ({"__metadata__": {"a": 1}, "a": entry()}, "map of strings"),
        ({"__metadata__": "x", "a": entry()}, "map of strings"),
    ],
)
def test_refuses_lies(entries: dict[str, Any], words: str) -> None:
    refused(entries, words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a":1,"a":2}', "twice"),
        (b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', "twice"),
        (b'{"a":NaN}', "not valid JSON"),
        (b'{"a":1e999}', "not valid JSON"),
        (b'{"a":', "not valid JSON"),
        (b'{"\xff":1}', "not valid JSON"),
        (b'{"a":' + b"[" * 100_000 + b"}", "nested|not valid"),
        (b'{"a":' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"[]", "does not start"),
        (b" {}", "does not start"),
        (b"", "does not start"),
    ],
)
def test_refuses_bad_json(text: bytes, words: str) -> None:
    refused(text, words, 0)


def test_limits() -> None:
    refused({"a": entry(), "b": entry(offsets=(8, 16))}, "tensors, more than", 16, Limits(max_tensors=1))
    assert parse({"a": entry("I64", (1,))}, 8, Limits(dtypes=frozenset({"I64"}))).tensors[0].dtype == "I64"


def test_refuses_what_is_too_large_before_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 40))
        file.truncate(1 << 41)  # sparse: takes no space
    with pytest.raises(InvalidAdapter, match="more than the"):
        read_header(path)
    with pytest.raises(InvalidAdapter, match="its header has"):
        read_header(path, Limits(max_file_bytes=1 << 42))


@pytest.mark.parametrize("size", [0, 1, 7])
def test_refuses_a_stub(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\0" * size)
    with pytest.raises(InvalidAdapter, match="too short"):
        read_header(path)


def test_refuses_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/hostname")
    for name in ("pipe", "link", "absent", "."):
        with pytest.raises(InvalidAdapter):
            read_header(tmp_path / name)


@given(cut=st.integers(min_value=0, max_value=200))
def test_every_truncation_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    text = json.dumps({"a": entry("F16", (3, 4), (0, 24)), "b": entry("BF16", (2,), (24, 28))}).encode()
    whole = struct.pack("<Q", len(text)) + text + b"\0" * 28
    path = tmp_path_factory.getbasetemp() / "cut.safetensors"
    path.write_bytes(whole[: min(cut, len(whole) - 1)])
    with pytest.raises(InvalidAdapter):
        read_header(path)


@given(data=st.binary(max_size=300), length=st.one_of(st.none(), st.integers(0, (1 << 64) - 1)))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, length: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data if length is None else struct.pack("<Q", length) + data)
    try:
        header = read_header(path)
    except InvalidAdapter:
        return
    assert header.file_bytes == path.stat().st_size


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["F32", "F16"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(entries=st.dictionaries(st.text(max_size=6), json_values, max_size=4), data_bytes=st.integers(0, 64))
def test_any_json_is_read_or_refused(entries: dict[str, Any], data_bytes: int) -> None:
    try:
        header = parse(entries, data_bytes)
    except InvalidAdapter:
        return
    assert sum(tensor.size_bytes for tensor in header.tensors) == data_bytes


@st.composite
def sound_headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    names = draw(st.lists(st.from_regex(r"[a-zA-Z0-9_.]{1,20}", fullmatch=True), unique=True, max_size=6))
    entries: dict[str, Any] = {}
    offset = 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(WIDTHS)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        size = WIDTHS[dtype]
        for dim in shape:
            size *= dim
        entries[name] = entry(dtype, shape, (offset, offset + size))
        offset += size
    order = draw(st.permutations(sorted(entries)))
    return {name: entries[name] for name in order}, offset


@given(sound=sound_headers())
def test_sound_headers_are_read(sound: tuple[dict[str, Any], int]) -> None:
    entries, data_bytes = sound
    header = parse(entries, data_bytes)
    assert {tensor.name: list(tensor.shape) for tensor in header.tensors} == {
        name: value["shape"] for name, value in entries.items()
    }


@given(sound=sound_headers(), change=st.integers(-16, 16).filter(bool), pick=st.integers(0, 5), which=st.integers(0, 1))
def test_a_changed_offset_is_refused(sound: tuple[dict[str, Any], int], change: int, pick: int, which: int) -> None:
    entries, data_bytes = sound
    if entries:
        name = sorted(entries)[pick % len(entries)]
        entries[name]["data_offsets"][which] += change
        with pytest.raises(InvalidAdapter):
            parse(entries, data_bytes)
