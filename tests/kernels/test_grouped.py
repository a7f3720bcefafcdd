"""The grouped path against a float64 sum over tokens."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from manylora.kernels import grouped  # noqa: E402

WIDTHS = (24, 8, 8)


def stacked(
    slots: int, max_rank: int, ranks: list[int], dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    a = [torch.zeros(slots, 1, max_rank, 20, dtype=dtype) for _ in WIDTHS]
    b = [torch.zeros(slots, 1, width, max_rank, dtype=dtype) for width in WIDTHS]
    for slot, rank in enumerate(ranks):
        for part in range(len(WIDTHS)):
            a[part][slot, 0, :rank] = torch.randn(rank, 20)
            b[part][slot, 0, :, :rank] = torch.randn(WIDTHS[part], rank)
    return a, b


def expected(
    y: torch.Tensor, x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], slots: list[int]
) -> torch.Tensor:
    """One token at a time, in float64, at the full width of the stacked weights."""
    out = y.double()
    for row, slot in enumerate(slots):
        offset = 0
        for a_part, b_part, width in zip(a, b, WIDTHS, strict=True):
            if slot >= 0:
                out[row, offset : offset + width] += b_part[slot, 0].double() @ (
                    a_part[slot, 0].double() @ x[row].double()
                )
            offset += width
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "slots",
    [[0, 0, 0, 0], [0, -1, 1, -1, 0, 2], [-1, -1], [2], [1, 1, -1, -1, 0, 0, 2, 2], [2, 1, 0, -1]],
    ids=["one", "mixed with base", "base only", "one token", "runs", "scattered"],
)
def test_equals_the_sum_over_tokens(slots: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ranks = [4, 16, 7]
    a, b = stacked(3, 16, ranks, dtype)
    x = torch.randn(len(slots), 20).to(dtype)
    y = torch.randn(len(slots), sum(WIDTHS)).to(dtype)
    want = expected(y, x, a, b, slots)
    groups = grouped.row_groups(torch.tensor(slots), ranks)
    grouped.add_lora(y, x, a, b, WIDTHS, groups, grouped.ExactViews())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance * 10)


def test_rows_without_an_adapter_are_not_touched() -> None:
    torch.manual_seed(1)
    a, b = stacked(2, 8, [8, 8], torch.float32)
    y = torch.randn(3, sum(WIDTHS))
    before = y.clone()
    grouped.add_lora(
        y, torch.randn(3, 20), a, b, WIDTHS, grouped.row_groups(torch.tensor([-1, 1, -1]), [8, 8]), grouped.ExactViews()
    )
    assert torch.equal(y[0], before[0])
    assert torch.equal(y[2], before[2])
    assert not torch.equal(y[1], before[1])


def test_scale_multiplies_the_update() -> None:
    torch.manual_seed(2)
    a, b = stacked(1, 4, [4], torch.float32)
    x, once, twice = torch.randn(2, 20), torch.zeros(2, sum(WIDTHS)), torch.zeros(2, sum(WIDTHS))
    groups = grouped.row_groups(torch.tensor([0, 0]), [4])
    grouped.add_lora(once, x, a, b, WIDTHS, groups, grouped.ExactViews())
    grouped.add_lora(twice, x, a, b, WIDTHS, groups, grouped.ExactViews(), scale=2.0)
    torch.testing.assert_close(twice, 2 * once)


def test_consecutive_rows_are_a_slice() -> None:
    first, second = grouped.row_groups(torch.tensor([1, 1, 0, -1, 0]), [4, 4])
    assert (first.slot, first.rows.tolist()) == (0, [2, 4])
    assert (second.slot, second.rows) == (1, slice(0, 2))


def test_views_follow_what_the_weights_hold_and_tell_layers_apart() -> None:
    torch.manual_seed(3)
    views = grouped.ExactViews(limit=3)
    groups = grouped.row_groups(torch.tensor([0, 1]), [4, 2])
    layers = [stacked(2, 4, [4, 2], torch.float32) for _ in range(5)]
    for _ in range(2):
        for a, b in layers:
            x, y = torch.randn(2, 20), torch.randn(2, sum(WIDTHS))
            want = expected(y, x, a, b, [0, 1])
            grouped.add_lora(y, x, a, b, WIDTHS, groups, views)
            torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-4)
            for stack in (*a, *b):
                stack.mul_(0.5)
