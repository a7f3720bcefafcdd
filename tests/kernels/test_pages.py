"""The layout's arithmetic."""

from __future__ import annotations

import pytest

from manylora.kernels.pages import MAX_WASTE, ROWS, Layout, Module, rank_blocks


def model(hidden: int, kv: int, mlp: int, layers: int) -> list[Module]:
    return [
        module
        for layer in range(layers)
        for module in (
            Module(f"{layer}.qkv", hidden, (hidden, kv, kv)),
            Module(f"{layer}.o", hidden, (hidden,)),
            Module(f"{layer}.gate_up", hidden, (mlp, mlp)),
            Module(f"{layer}.down", mlp, (hidden,)),
        )
    ]


@pytest.mark.parametrize(
    ("name", "hidden", "kv", "mlp", "columns"),
    [
        ("Llama 3.1 8B", 4096, 1024, 14336, 2048),
        ("Llama 3.1 70B", 8192, 1024, 28672, 2048),
        ("Qwen 2.5 0.5B", 896, 128, 4864, 128),
        ("SmolLM2 135M", 576, 192, 1536, 64),
    ],
)
def test_pages_are_as_wide_as_waste_allows(name: str, hidden: int, kv: int, mlp: int, columns: int) -> None:
    layout = Layout.of(model(hidden, kv, mlp, 2))
    assert layout.columns == columns
    assert layout.waste() <= MAX_WASTE


def test_entries_of_modules_do_not_overlap() -> None:
    layout = Layout.of(model(576, 192, 1536, 3))
    taken: list[int] = []
    for place in layout.places:
        for slice_, out_pages in enumerate(place.out_pages):
            taken += range(place.a(slice_), place.a(slice_) + place.in_pages)
            taken += range(place.b(slice_), place.b(slice_) + out_pages)
    assert sorted(taken) == list(range(layout.entries_per_block))


@pytest.mark.parametrize(("lora_rank", "blocks"), [(1, 1), (8, 1), (9, 2), (64, 8), (512, 64)])
def test_ranks_are_rounded_up_to_a_block(lora_rank: int, blocks: int) -> None:
    assert rank_blocks(lora_rank) == blocks
    assert ROWS == 8
