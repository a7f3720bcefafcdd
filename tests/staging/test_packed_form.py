"""Blocks of bytes: what comes out is exactly what went in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from peft_folders import MODULES, VOCABULARY, layout, whole_adapter, write  # noqa: E402
from peft_folders import config as peft_config  # noqa: E402

from manylora.errors import CorruptBlob  # noqa: E402
from manylora.kernels.exact import ExactAdapter  # noqa: E402
from manylora.kernels.packing import Factors, PackedAdapter  # noqa: E402
from manylora.staging.folder import AdapterWeights, read_folder  # noqa: E402
from manylora.staging.layout import EXACT, PAGES, EngineLayout  # noqa: E402
from manylora.staging.packed_form import (  # noqa: E402
    ALIGNMENT,
    MAGIC,
    PackedHeader,
    block_bytes,
    block_digest,
    copy_block,
    fill,
    header_of,
    pack_weights,
    packed_bytes,
    payload_start,
    read_header,
    view_packed,
    write_head,
)

DIGEST = "5a" * 32
Weights = dict[int, list[Factors | None]]
ENGINES = [
    layout(form=EXACT),
    *(layout(form=PAGES, dtype=dtype) for dtype in ("float32", "float16", "bfloat16")),
    layout(form=PAGES, columns=2048),
]
EACH = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: f"{engine.form}-{engine.dtype}-{engine.columns}")


def weights(engine: EngineLayout, ranks: dict[int, list[int]], rows: int = 0) -> Weights:
    """Random factors at these ranks by module and slice; tables of `rows` rows; rank 0: an unchanged slice."""
    found: Weights = {}
    for number, of_slices in ranks.items():
        each = engine.modules[number]
        slices: list[Factors | None] = []
        for lora_rank, width in zip(of_slices, each.widths, strict=True):
            columns, out = each.in_features, width
            if rows and each.is_lookup:
                columns = rows
            elif rows and not each.full_in_features:
                out = rows
            dtype = getattr(torch, engine.dtype)
            a, b = torch.randn(lora_rank, columns).to(dtype), torch.randn(out, lora_rank).to(dtype)
            slices.append((a, b) if lora_rank else None)
        found[number] = slices
    return found


def block_of(
    engine: EngineLayout, packed: Any, *, sha256: str = "", dirt: int = 0xA7
) -> tuple[bytearray, PackedHeader]:
    """A packed adapter in memory that was dirty before."""
    header = header_of(packed, digest=DIGEST, layout=engine, read=AdapterWeights({}, 3, ("a.b",)))
    header = msgspec.structs.replace(header, sha256=sha256)
    block = bytearray([dirt]) * block_bytes(header)
    fill(block, header, packed)
    return block, header


def same(mine: Any, theirs: Any, *, padded: bool = False) -> None:
    """Equal to the last bit; where tables are padded, only the padding's columns may be missing."""
    assert type(mine) is type(theirs)
    if isinstance(theirs, PackedAdapter):
        assert mine.images.dtype == theirs.images.dtype
        assert torch.equal(mine.images.view(torch.uint8), theirs.images.view(torch.uint8))
        assert torch.equal(mine.entries, theirs.entries)
        assert mine.modules.dtype == theirs.modules.dtype == np.int64
        assert mine.modules.tolist() == theirs.modules.tolist()
        assert (mine.rank_blocks, mine.exact_bytes) == (theirs.rank_blocks, theirs.exact_bytes)
        assert mine.nbytes == theirs.nbytes
        return
    assert isinstance(theirs, ExactAdapter)
    assert mine.nbytes == theirs.nbytes
    assert list(mine.products) == list(theirs.products)
    for number, product in theirs.products.items():
        found = mine.products[number]
        assert torch.equal(found.a, product.a)
        assert len(found.b) == len(product.b)
        for (ranks, columns, b), (its_ranks, its_columns, its_b) in zip(found.b, product.b, strict=True):
            assert ranks == its_ranks
            assert columns.start == its_columns.start
            assert columns.stop == (columns.start + its_b.shape[1] if padded else its_columns.stop)
            assert torch.equal(b, its_b)


def there_and_back(engine: EngineLayout, made: Weights, *, padded: bool = False) -> None:
    packed = pack_weights(engine, made)
    block, header = block_of(engine, packed)
    assert read_header(block) == header
    assert packed_bytes(header) == packed.nbytes
    same(view_packed(block, read_header(block)), packed, padded=padded)
    copied = copy_block(block)
    block[:] = bytes(len(block))
    same(view_packed(copied, read_header(copied)), packed, padded=padded)


@EACH
@pytest.mark.parametrize("lora_rank", [1, 2, 7, 8, 9, 64, 512])
def test_every_rank(engine: EngineLayout, lora_rank: int) -> None:
    small = msgspec.structs.replace(engine, modules=tuple(each for each in MODULES if sum(each.widths) < 1000))
    there_and_back(
        small, weights(small, {number: [lora_rank] * len(each.widths) for number, each in enumerate(small.modules)})
    )


@EACH
def test_ranks_that_differ_from_slice_to_slice(engine: EngineLayout) -> None:
    ranks = {number: [3 + 5 * nth for nth in range(len(each.widths))] for number, each in enumerate(engine.modules)}
    there_and_back(engine, weights(engine, ranks))


@EACH
@pytest.mark.parametrize("ranks", [[8, 0, 0], [0, 8, 0], [0, 0, 8], [8, 0, 4], [0, 0, 0]], ids=str)
def test_slices_that_the_adapter_leaves(engine: EngineLayout, ranks: list[int]) -> None:
    there_and_back(engine, weights(engine, {0: ranks}))
    there_and_back(engine, weights(engine, {0: ranks, 5: [4, 0], 1: [8]}))
    there_and_back(engine, weights(engine, {5: [0, 20]}))


@EACH
def test_an_adapter_without_modules(engine: EngineLayout) -> None:
    there_and_back(engine, {})


@EACH
@pytest.mark.parametrize("lora_rank", [1, 5])
@pytest.mark.parametrize("number", [2, 6], ids=["lookup", "one input"])
def test_thin_factors_alone(engine: EngineLayout, number: int, lora_rank: int) -> None:
    """A matrix of one row or column is contiguous whichever way it is turned."""
    there_and_back(engine, weights(engine, {number: [lora_rank]}))


@EACH
@pytest.mark.parametrize("lora_rank", [1, 8])
def test_tables_shorter_than_the_engines(engine: EngineLayout, lora_rank: int) -> None:
    """What follows a short table in the block is where it belongs."""
    made = weights(engine, {3: [lora_rank], 2: [lora_rank], 1: [lora_rank]}, rows=VOCABULARY)
    there_and_back(engine, made, padded=True)


@settings(max_examples=40)
@given(st.data())
def test_any_adapter(data: Any) -> None:
    engine = data.draw(st.sampled_from(ENGINES))
    engine = msgspec.structs.replace(engine, modules=tuple(each for each in MODULES if sum(each.widths) < 1000))
    numbers = data.draw(st.lists(st.integers(0, len(engine.modules) - 1), unique=True))
    ranks = {
        number: data.draw(
            st.lists(
                st.sampled_from([0, 1, 2, 7, 8, 9, 33]),
                min_size=len(engine.modules[number].widths),
                max_size=len(engine.modules[number].widths),
            )
        )
        for number in numbers
    }
    there_and_back(engine, weights(engine, ranks))


@EACH
def test_a_folder_survives_too(tmp_path: Path, engine: EngineLayout) -> None:
    read = read_folder(write(tmp_path / "a", whole_adapter(8), peft_config()), engine)
    packed = pack_weights(engine, read.weights)
    header = header_of(packed, digest=DIGEST, layout=engine, read=read)
    block = bytearray(block_bytes(header))
    fill(block, header, packed)
    same(view_packed(block, header), packed, padded=True)
    assert (header.digest, header.layout) == (DIGEST, engine.key)
    assert (header.changed_modules, header.unknown) == (read.modules, read.unknown)


@EACH
def test_a_view_is_over_the_blocks_own_memory(engine: EngineLayout) -> None:
    block, header = block_of(engine, pack_weights(engine, weights(engine, {1: [8]})))
    view = view_packed(block, header)
    block[payload_start(header) :] = bytes(len(block) - payload_start(header))
    numbers = view.images if isinstance(view, PackedAdapter) else view.products[1].a
    assert not numbers.any()


# ---- heads ----


@EACH
@pytest.mark.parametrize("unknown", [0, 1, 39, 40, 41, 42, 43, 44, 400])
def test_the_payload_begins_at_the_same_place_with_a_hash_and_without(engine: EngineLayout, unknown: int) -> None:
    packed = pack_weights(engine, weights(engine, {1: [8]}))
    for length in range(90, 110):
        read = AdapterWeights({}, 1, ("x" * length,) * unknown)
        header = header_of(packed, digest=DIGEST, layout=engine, read=read)
        hashed = msgspec.structs.replace(header, sha256="f" * 64)
        assert payload_start(hashed) == payload_start(header)
        assert payload_start(header) % ALIGNMENT == 0
        assert block_bytes(hashed) == block_bytes(header)
        head = bytearray(b"\xee") * payload_start(header)
        write_head(head, hashed)
        assert read_header(head) == hashed


def test_a_head_of_any_length_fits() -> None:
    """Around the length at which it needs another page."""
    engine = ENGINES[0]
    packed = pack_weights(engine, {})
    starts = set()
    for length in range(3400, 4100):
        header = header_of(packed, digest=DIGEST, layout=engine, read=AdapterWeights({}, 1, ("x" * length,)))
        hashed = msgspec.structs.replace(header, sha256="f" * 64)
        block = bytearray(block_bytes(hashed))
        write_head(block, hashed)
        assert read_header(block) == hashed
        assert len(block) == block_bytes(hashed)
        starts.add(payload_start(hashed))
    assert starts == {ALIGNMENT, 2 * ALIGNMENT}


@EACH
def test_nothing_of_what_was_there_before_remains(engine: EngineLayout) -> None:
    packed = pack_weights(engine, weights(engine, {0: [8, 0, 3], 3: [8]}))
    blocks = [block_of(engine, packed, dirt=dirt) for dirt in (0x00, 0xA7, 0xFF)]
    assert blocks[0] == blocks[1] == blocks[2]
    assert len({block_digest(*block) for block in blocks}) == 1


def test_what_is_no_block_is_refused() -> None:
    engine = ENGINES[0]
    block, header = block_of(engine, pack_weights(engine, weights(engine, {1: [8]})))
    text_end = len(MAGIC) + 4 + len(msgspec.json.encode(header))
    for length in (0, 1, 7, 8, 11, 12, 13, text_end - 1):
        with pytest.raises(CorruptBlob):
            read_header(block[:length])
    assert read_header(block[:text_end]) == header
    for length in (text_end, payload_start(header), len(block) - 1):
        with pytest.raises(CorruptBlob, match="cut off"):
            view_packed(block[:length], header)
    for at in range(len(MAGIC)):
        changed = bytearray(block)
        changed[at] ^= 1
        with pytest.raises(CorruptBlob):
            read_header(changed)
    for length_bytes in (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x05\0\0\0"):
        changed = bytearray(block)
        changed[8:12] = length_bytes
        with pytest.raises(CorruptBlob):
            read_header(changed)


@pytest.mark.parametrize("change", [{"digest": 7}, {"payload_bytes": "x"}, {"products": [[1]]}, {"modules": None}])
def test_heads_of_another_kind_are_refused(change: dict[str, Any]) -> None:
    _, header = block_of(ENGINES[0], pack_weights(ENGINES[0], {}))
    text = json.dumps({**json.loads(msgspec.json.encode(header)), **change}).encode()
    with pytest.raises(CorruptBlob, match="cannot be read"):
        read_header(MAGIC + len(text).to_bytes(4, "little") + text)


def test_a_block_is_none_until_it_is_whole() -> None:
    engine = ENGINES[0]
    packed = pack_weights(engine, weights(engine, {1: [8]}))
    header = header_of(packed, digest=DIGEST, layout=engine, read=AdapterWeights({}, 1, ()))
    short = bytearray(block_bytes(header) - 1)
    with pytest.raises(ValueError, match="buffer"):
        fill(short, header, packed)
    with pytest.raises(CorruptBlob):
        read_header(short)


@EACH
def test_the_digest_covers_every_number_of_the_head_and_the_payload(engine: EngineLayout) -> None:
    block, header = block_of(engine, pack_weights(engine, weights(engine, {0: [8, 2, 4], 1: [8]})))
    digest = block_digest(block, header)
    assert block_digest(block, msgspec.structs.replace(header, sha256=digest)) == digest
    changes: list[dict[str, Any]] = [
        {"digest": "5b" * 32},
        {"layout": "0" * 32},
        {"changed_modules": 4},
        {"unknown": ()},
        {"dtype": "float64"},
        {"modules": (0, 2)},
        {"rank_blocks": header.rank_blocks + 1},
        {"exact_bytes": 1},
        {"products": header.products[:1] if header.products else ((9, 1, 1, False, ()),)},
    ]
    for change in changes:
        assert block_digest(block, msgspec.structs.replace(header, **change)) != digest
    start = payload_start(header)
    for at in {start, start + header.payload_bytes // 2, start + header.payload_bytes - 1}:
        changed = bytearray(block)
        changed[at] ^= 64
        assert block_digest(changed, header) != digest
