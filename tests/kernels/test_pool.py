"""The pool: what it holds under churn, what it wastes, and how it refuses."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from manylora.errors import Unavailable  # noqa: E402
from manylora.kernels.extents import Extents  # noqa: E402
from manylora.kernels.packing import Factors, pack  # noqa: E402
from manylora.kernels.pages import ZERO_PAGE, Layout, Module  # noqa: E402
from manylora.kernels.pool import AdapterPool, Placed, PoolFull, copy_in_pieces  # noqa: E402

MODULES = (Module("qkv", 256, (256, 64, 64)), Module("down", 704, (256,)))
Adapter = dict[int, list[Factors | None]]


def adapter(lora_rank: int, modules: tuple[int, ...] = (0, 1)) -> Adapter:
    return {
        number: [
            (torch.randn(lora_rank, MODULES[number].in_features), torch.randn(width, lora_rank))
            for width in MODULES[number].widths
        ]
        for number in modules
    }


def place(pool: AdapterPool, weights: Adapter) -> Placed:
    return pool.place(pack(pool.layout, weights, torch.float32))


def read_back(pool: AdapterPool, placed: Placed, number: int, slice_: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both factors as the table names them, padded."""
    place, blocks = pool.layout.places[number], placed.rank_blocks

    def factor(first: int, pages: int) -> torch.Tensor:
        start = placed.table + first * blocks
        entries = pool.table[start : start + blocks * pages].long()
        return pool.pages[entries].view(blocks, pages, 8, -1).transpose(1, 2).reshape(blocks * 8, -1)

    return factor(place.a(slice_), place.in_pages), factor(place.b(slice_), place.out_pages[slice_])


def check(pool: AdapterPool, placed: Placed, weights: Adapter) -> None:
    for number in range(len(MODULES)):
        for slice_, width in enumerate(MODULES[number].widths):
            a, b = read_back(pool, placed, number, slice_)
            factors = weights[number][slice_] if number in weights else None
            expected_a, expected_b = torch.zeros_like(a), torch.zeros_like(b)
            if factors is not None:
                lora_rank = factors[0].shape[0]
                expected_a[:lora_rank, : MODULES[number].in_features] = factors[0]
                expected_b[:lora_rank, :width] = factors[1].t()
            assert torch.equal(a, expected_a)
            assert torch.equal(b, expected_b)


def test_adapters_keep_their_weights_under_churn() -> None:
    draw = random.Random(5)
    pool = AdapterPool(Layout.of(MODULES), 600_000, torch.float32, "cpu")
    held: list[tuple[Placed, Adapter]] = []
    refused = 0
    for _ in range(120):
        if held and draw.random() < 0.45:
            pool.remove(held.pop(draw.randrange(len(held)))[0])
        weights = adapter(draw.choice([1, 4, 8, 12, 33]), draw.choice([(0, 1), (0,), (1,)]))
        try:
            held.append((place(pool, weights), weights))
        except PoolFull:
            refused += 1
            pool.remove(held.pop(0)[0])
        for placed, kept in held:
            check(pool, placed, kept)
        in_use = [page for placed, _ in held for page in placed.pages]
        assert len(set(in_use)) == len(in_use)
        assert ZERO_PAGE not in in_use
        assert pool.free_pages + len(in_use) == pool.pages.shape[0] - 1
    assert refused > 0
    for placed, _ in held:
        pool.remove(placed)
    assert pool.free_pages == pool.pages.shape[0] - 1
    assert place(pool, adapter(8)).rank_blocks == 1


def test_a_full_block_of_ranks_wastes_no_more_than_the_layout_says() -> None:
    pool = AdapterPool(Layout.of(MODULES), 4_000_000, torch.float32, "cpu")
    packed = pack(pool.layout, adapter(16), torch.float32)
    held = len(pool.place(packed).pages) * pool.page_bytes
    assert held == packed.nbytes
    assert packed.exact_bytes <= held <= packed.exact_bytes / (1 - pool.layout.waste()) + 1


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    pool = AdapterPool(Layout.of(MODULES), 160_000, torch.float32, "cpu")
    kept_weights = adapter(8)
    kept = place(pool, kept_weights)
    free, table = pool.free_pages, pool.table.clone()
    with pytest.raises(PoolFull, match=r"needs \d+ pages, and \d+ are free"):
        place(pool, adapter(64))
    assert pool.free_pages == free
    assert torch.equal(pool.table, table)
    check(pool, kept, kept_weights)


def test_a_budget_for_nothing_is_refused() -> None:
    with pytest.raises(Unavailable, match="holds no adapter of rank 8"):
        AdapterPool(Layout.of(MODULES), 10_000, torch.float32, "cpu")


def test_extents_join_again() -> None:
    draw = random.Random(2)
    extents, held = Extents(100), []
    for _ in range(400):
        if held and draw.random() < 0.5:
            extents.give_back(*held.pop(draw.randrange(len(held))))
        length = draw.randint(1, 30)
        start = extents.take(length)
        if start is not None:
            assert start + length <= 100
            assert all(start + length <= begin or begin + size <= start for begin, size in held)
            held.append((start, length))
    for start, length in held:
        extents.give_back(start, length)
    assert extents.take(100) == 0


@pytest.mark.parametrize("piece_bytes", [64, 100, 4096, 1 << 24])
def test_a_copy_in_pieces_is_whole_wherever_it_begins(piece_bytes: int) -> None:
    memory = torch.randint(0, 255, (5000,), dtype=torch.uint8)
    for first in (0, 1, 63, 64, 65, 1000):
        source = memory[first : first + 3001]
        target = torch.zeros(3001, dtype=torch.uint8)
        copy_in_pieces(target, source, piece_bytes)
        assert torch.equal(target, source)
    images = torch.randn(7, 8, 64, dtype=torch.bfloat16)
    arrived = torch.empty_like(images)
    copy_in_pieces(arrived, images, piece_bytes)
    assert torch.equal(arrived, images)
