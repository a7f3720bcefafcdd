"""The CPU path against a float64 sum over tokens, at random ranks."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from manylora.errors import InvalidAdapter  # noqa: E402
from manylora.kernels import exact  # noqa: E402
from manylora.kernels.exact import ExactAdapter, RowGroup, add_lora, add_lora_embedding, pack_exact  # noqa: E402
from manylora.kernels.packing import Factors  # noqa: E402
from manylora.kernels.pages import Module  # noqa: E402

MODULES = (
    Module("qkv", 20, (24, 8, 8)),
    Module("o", 24, (20,)),
    Module("embed", 50, (20,), is_lookup=True),
    # Too wide for one product with zeros in it.
    Module("gate_up", 20, (3000, 6000)),
)
QKV, OUT, EMBED, GATE_UP = range(len(MODULES))
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
Weights = dict[int, list[Factors | None]]


def random_weights(draw: random.Random, dtype: torch.dtype, *ranks: int) -> Weights:
    """Factors of every module, each slice's rank drawn from `ranks` (0: the adapter does not change this slice)."""

    def factors(module: Module, width: int) -> Factors | None:
        lora_rank = draw.choice(ranks)
        if lora_rank == 0:
            return None
        a = torch.randn(lora_rank, module.in_features) / module.in_features**0.5
        return a.to(dtype), torch.randn(width, lora_rank).to(dtype)

    return {number: [factors(module, width) for width in module.widths] for number, module in enumerate(MODULES)}


def expected(y: torch.Tensor, x: torch.Tensor, number: int, of_row: list[Weights | None]) -> torch.Tensor:
    """One row at a time, in float64. Of an embedding `x` holds ids."""
    out = y.double()
    for row, weights in enumerate(of_row):
        column = 0
        for factors, width in zip(weights[number] if weights else (), MODULES[number].widths, strict=False):
            if factors is not None:
                a, b = (factor.double() for factor in factors)
                if not MODULES[number].is_lookup:
                    out[row, column : column + width] += b @ (a @ x[row].double())
                elif 0 <= x[row] < a.shape[1]:
                    out[row, column : column + width] += b @ a[:, int(x[row])]
            column += width
    return out


def groups_of(which: list[int], packed: list[ExactAdapter]) -> tuple[RowGroup, ...]:
    return exact.row_groups([packed[number] if number >= 0 else None for number in which])


BATCHES = {
    "one adapter": [0, 0, 0, 0],
    "mixed with the base": [0, -1, 1, -1, 0, 2],
    "base only": [-1, -1],
    "one token": [2],
    "runs": [1, 1, -1, -1, 0, 0, 2, 2],
    "interleaved": [2, 1, 0, 2, -1, 1, 0, 2],
}


@DTYPES
@pytest.mark.parametrize("number", [QKV, OUT, GATE_UP], ids=lambda number: MODULES[number].name)
@pytest.mark.parametrize("which", BATCHES.values(), ids=BATCHES.keys())
def test_equals_the_sum_over_tokens(which: list[int], number: int, dtype: torch.dtype) -> None:
    torch.manual_seed(len(which))
    draw = random.Random(number)
    adapters = [random_weights(draw, dtype, *ranks) for ranks in ((4,), (0, 1, 16), (0, 7, 33))]
    packed = [pack_exact(MODULES, weights) for weights in adapters]
    x = torch.randn(len(which), MODULES[number].in_features).to(dtype)
    y = torch.randn(len(which), sum(MODULES[number].widths)).to(dtype)
    before = y.clone()
    add_lora(y, x, number, groups_of(which, packed))
    want = expected(before, x, number, [adapters[each] if each >= 0 else None for each in which])
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=10 * tolerance)
    base = [row for row, each in enumerate(which) if each < 0]
    assert torch.equal(y[base], before[base])


@DTYPES
def test_an_embedding_takes_a_column_of_a_for_each_id(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    adapters = [random_weights(random.Random(2), dtype, 5), random_weights(random.Random(3), dtype, 12)]
    packed = [pack_exact(MODULES, weights) for weights in adapters]
    which = [0, 1, -1, 1, 0, 0, 1]
    ids = torch.tensor([0, 49, 7, 7, 50, 1 << 20, -1])  # the last three are beyond what the adapter has
    y = torch.randn(len(which), 20).to(dtype)
    before = y.clone()
    add_lora_embedding(y, ids, EMBED, groups_of(which, packed))
    want = expected(before, ids, EMBED, [adapters[each] if each >= 0 else None for each in which])
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=10 * tolerance)
    assert torch.equal(y[[2, 4, 5, 6]], before[[2, 4, 5, 6]])


def test_int32_ids_are_ids_too() -> None:
    torch.manual_seed(2)
    weights = random_weights(random.Random(2), torch.float32, 5)
    y, ids = torch.zeros(2, 20), torch.tensor([3, 11], dtype=torch.int32)
    add_lora_embedding(y, ids, EMBED, groups_of([0, 0], [pack_exact(MODULES, weights)]))
    torch.testing.assert_close(y.double(), expected(torch.zeros(2, 20), ids, EMBED, [weights, weights]))


def test_a_module_that_an_adapter_does_not_change_is_left_alone() -> None:
    torch.manual_seed(3)
    weights = random_weights(random.Random(1), torch.float32, 8)
    weights[QKV] = [None, None, None]
    del weights[OUT]
    packed = pack_exact(MODULES, weights)
    assert sorted(packed.products) == [EMBED, GATE_UP]
    for number in (QKV, OUT):
        y = torch.randn(2, sum(MODULES[number].widths))
        before = y.clone()
        add_lora(y, torch.randn(2, MODULES[number].in_features), number, groups_of([0, 0], [packed]))
        assert torch.equal(y, before)


def test_slices_are_one_product_where_they_are_small_and_several_where_they_are_wide() -> None:
    packed = pack_exact(MODULES, random_weights(random.Random(1), torch.float32, 16))
    assert len(packed.products[QKV].b) == 1
    assert len(packed.products[GATE_UP].b) == 2


def test_bytes_are_those_that_are_held() -> None:
    weights: Weights = {OUT: [(torch.randn(4, 24), torch.randn(20, 4))]}
    assert pack_exact(MODULES, weights).nbytes == (4 * 24 + 20 * 4) * 4
    assert pack_exact(MODULES, {}).nbytes == 0


def test_a_packed_adapter_shares_nothing_with_what_it_was_made_of() -> None:
    torch.manual_seed(4)
    weights = random_weights(random.Random(1), torch.bfloat16, 8)
    kept = {number: [None if f is None else (f[0].clone(), f[1].clone()) for f in fs] for number, fs in weights.items()}
    packed = pack_exact(MODULES, weights)
    for factors in (factors for slices in weights.values() for factors in slices if factors is not None):
        factors[0].zero_()
        factors[1].zero_()
    x, y = torch.randn(1, 24), torch.zeros(1, 20)
    add_lora(y, x, OUT, groups_of([0], [packed]))
    torch.testing.assert_close(y.double(), expected(torch.zeros(1, 20), x, OUT, [kept]), rtol=1e-4, atol=1e-4)


def test_runs_of_rows_are_slices_and_many_runs_a_gather() -> None:
    one, other = (pack_exact(MODULES, {}) for _ in range(2))
    groups = exact.row_groups([one, one, other, None, other])
    assert [group.adapter for group in groups] == [one, other, other]
    assert [group.rows for group in groups] == [slice(0, 2), slice(2, 3), slice(4, 5)]
    [gathered, *_] = exact.row_groups([one, other] * 5)
    assert gathered.rows.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        ([None, None], "qkv has 3 slices, the adapter 2"),
        ([(torch.zeros(4, 20), torch.zeros(24, 5)), None, None], "qkv: lora_A has rank 4, lora_B 5"),
        ([(torch.zeros(4, 21), torch.zeros(24, 4)), None, None], "lora_A of 20 columns .* the adapter has 21 and 24"),
        ([None, (torch.zeros(4, 20), torch.zeros(9, 4)), None], "lora_B of 8 rows, the adapter has 20 and 9"),
    ],
    ids=["slices", "ranks", "columns", "rows"],
)
def test_factors_that_do_not_fit_are_refused(slices: list[Factors | None], said: str) -> None:
    with pytest.raises(InvalidAdapter, match=said):
        pack_exact(MODULES, {QKV: slices})
