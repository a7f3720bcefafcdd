"""The pool and the GPU kernels against float64, on random adapters. Triton's interpreter runs them where no GPU is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import numpy as np  # noqa: E402

from manylora.kernels.packing import Factors, pack  # noqa: E402
from manylora.kernels.paged_lora import (  # noqa: E402
    GROUP_TOKENS,
    DevicePlan,
    Tuning,
    add_lora,
    add_lora_embedding,
    sums_numel,
    tile_tokens,
)
from manylora.kernels.pages import Layout, Module  # noqa: E402
from manylora.kernels.pool import AdapterPool, Placed  # noqa: E402
from manylora.kernels.step_plan import ITEM_FIELDS, plan_step  # noqa: E402

# Triton's interpreter turns arrays of one number into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PDL = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] >= 9
MODULES = (
    Module("qkv", 48, (48, 16, 16)),
    Module("gate_up", 48, (100, 100)),
    Module("down", 100, (48,)),
)
TUNING = Tuning(
    shrink_programs=7, shrink_width=32, shrink_step=32, shrink_stages=1, expand_programs=5, expand_tile=32,
    few_tile=16, rank_tile=16, tile_shrink_programs=3, tile_shrink_step=32, tile_shrink_stages=1,
    tile_expand_programs=5, tile_expand_reach=64, tile_expand_span=32, dependent_launch=PDL,
)  # fmt: skip
MAX_RANK = 48
# The interpreter computes with numpy, which has no products in bfloat16.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
Adapter = dict[int, list[Factors | None]]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the tests' conftest, which had Triton imported this way."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def random_adapter(generator: torch.Generator, ranks: list[int], dtype: torch.dtype) -> Adapter:
    """Factors of every slice of every module, each slice's rank drawn from `ranks` (0: this slice has none)."""

    def factors(module: Module, width: int) -> Factors | None:
        lora_rank = ranks[int(torch.randint(len(ranks), (1,), generator=generator))]
        if lora_rank == 0:
            return None
        a = torch.randn(lora_rank, module.in_features, generator=generator) / module.in_features**0.5
        return a.to(dtype), torch.randn(width, lora_rank, generator=generator).to(dtype)

    return {number: [factors(module, width) for width in module.widths] for number, module in enumerate(MODULES)}


def reference(
    y: torch.Tensor, x: torch.Tensor, number: int, adapters: list[Adapter], of_token: list[int]
) -> torch.Tensor:
    """The same in float64, token by token."""
    result = y.double().clone()
    for token, adapter in enumerate(of_token):
        column = 0
        for width, factors in zip(
            MODULES[number].widths, adapters[adapter][number] if adapter >= 0 else (), strict=False
        ):
            if factors is not None:
                a, b = (factor.double() for factor in factors)
                result[token, column : column + width] += b @ (a @ x[token].double())
            column += width
    return result


def device_plan(of_token: list[int], placed: list[Placed], spare: int = 3) -> DevicePlan:
    """The plan in buffers with room to spare, whose spare part is nonsense."""
    tables = np.array([one.table for one in placed], np.int32)
    blocks = np.array([one.rank_blocks for one in placed], np.int32)
    plan = plan_step(np.array(of_token, np.int32), tables, blocks, GROUP_TOKENS, tile_tokens(len(of_token)))
    nonsense = 1 << 30
    order = np.concatenate([plan.order, np.full(len(of_token) - len(plan.order), nonsense, np.int32)])
    groups = np.concatenate([plan.groups, np.full((spare, 4), nonsense, np.int32)])
    items = np.concatenate([plan.items, np.full((spare, ITEM_FIELDS), nonsense, np.int32)])
    tiles = np.concatenate([plan.tiles, np.full((spare, 4), nonsense, np.int32)])
    return DevicePlan(*(torch.from_numpy(part).to(DEVICE) for part in (order, groups, items, tiles, plan.counts)))


def run(
    adapters: list[Adapter],
    of_token: list[int],
    dtype: torch.dtype,
    columns: int,
    pool: AdapterPool | None = None,
    max_rank: int = MAX_RANK,
) -> float:
    """Every module once; the largest error, relative to the largest change."""
    pool = pool or AdapterPool(Layout.of(MODULES, columns), 1 << 22, dtype, DEVICE)
    placed = [pool.place(pack(pool.layout, adapter, dtype)) for adapter in adapters]
    plan = device_plan(of_token, placed)
    worst = 0.0
    generator = torch.Generator().manual_seed(len(of_token))
    for number, module in enumerate(MODULES):
        x = torch.randn(len(of_token), module.in_features, generator=generator).to(dtype)
        y = torch.randn(len(of_token), sum(module.widths), generator=generator).to(dtype)
        expected = reference(y, x, number, adapters, of_token)
        sums = torch.full((sums_numel(pool, len(of_token), max_rank, TUNING),), float("nan"), device=DEVICE)
        got = y.to(DEVICE, copy=True)
        add_lora(got, x.to(DEVICE), number, pool, plan, sums, max_rank, TUNING)
        base = [token for token, adapter in enumerate(of_token) if adapter < 0]
        assert torch.equal(got.cpu()[base], y[base])
        change = (expected - y.double()).abs().max().item()
        worst = max(worst, (got.cpu().double() - expected).abs().max().item() / max(change, 1e-9))
    for one in placed:
        pool.remove(one)
    return worst


BATCHES = {
    "one token": [1],
    "base only": [-1, -1],
    "one each": [0, 1, 2, 3],
    "mixed with the base": [3, -1, 0, 0, -1, 2, 0, 1],
    "more than a group": [2] * 19 + [-1] + [0] * 17 + [2],
}


@pytest.mark.parametrize("of_token", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches_equal_the_reference(of_token: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    adapters = [random_adapter(generator, ranks, dtype) for ranks in ([8], [1, 4, 13], [0, 16, 48], [33])]
    error = run(adapters, of_token, dtype, columns=64)
    assert error <= (1e-5 if dtype is torch.float32 else 2e-2)


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of more than 8 tokens count as prompts: larger ones take the interpreter minutes."""
    monkeypatch.setattr("manylora.kernels.paged_lora.MANY_TOKENS", 8)


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts_beside_single_tokens_equal_the_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    adapters = [random_adapter(generator, ranks, dtype) for ranks in ([8], [1, 4, 13], [0, 16, 48], [33])]
    of_token = [2] * 67 + [-1] + [0] * 3 + [2] * 9 + [3] * 17 + [1]
    error = run(adapters, of_token, dtype, columns=64)
    assert error <= (1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("of_token", [[0, 1, 1, 0], [0] * 18 + [1] * 17 + [2]], ids=["groups", "tiles"])
def test_ranks_to_512(of_token: list[int]) -> None:
    generator = torch.Generator().manual_seed(5)
    adapters = [random_adapter(generator, ranks, torch.float32) for ranks in ([512], [0, 65, 100], [1])]
    assert run(adapters, of_token, torch.float32, columns=64, max_rank=512) <= 1e-5


@pytest.mark.parametrize("columns", [32, 128])
def test_pages_of_every_width(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    adapters = [random_adapter(generator, [0, 8, 24], torch.float32) for _ in range(3)]
    assert run(adapters, [0, 2, 2, 1, -1, 2], torch.float32, columns) <= 1e-5


def test_pages_that_were_others_before() -> None:
    """Churn: adapters come and go, so that pages lie anywhere and hold what others left."""
    generator = torch.Generator().manual_seed(7)
    pool = AdapterPool(Layout.of(MODULES, 64), 1 << 20, torch.float32, DEVICE)
    pool.pages[1:] = float("nan")
    some = [random_adapter(generator, [8, 16], torch.float32) for _ in range(6)]
    kept = [pool.place(pack(pool.layout, adapter, torch.float32)) for adapter in some]
    for one in kept[::2]:
        pool.remove(one)
    adapters = [random_adapter(generator, [0, 8, 40], torch.float32) for _ in range(3)]
    assert run(adapters, [0, 1, 2, 2, 1, 0], torch.float32, 64, pool) <= 1e-5


@pytest.mark.parametrize("many_tokens", [8, 512], ids=["tiles", "groups"])
def test_an_embedding_takes_a_column_of_a_for_each_token(many_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora.kernels.paged_lora.MANY_TOKENS", many_tokens)
    generator = torch.Generator().manual_seed(3)
    modules = (Module("embed_tokens", 300, (48,), is_lookup=True), Module("o", 48, (48,)))
    pool = AdapterPool(Layout.of(modules, 64), 1 << 20, torch.float32, DEVICE)
    factors = [(torch.randn(r, 300, generator=generator), torch.randn(48, r, generator=generator)) for r in (4, 20)]
    placed = [pool.place(pack(pool.layout, {0: [one]}, torch.float32)) for one in factors]
    placed.append(pool.place(pack(pool.layout, {}, torch.float32)))
    of_token = [0, 1, -1, 1, 2, 0] + [1] * 17
    ids = torch.randint(300, (len(of_token),), generator=generator)
    ids[3], ids[5] = 299, 305  # the last one, and one that the adapter does not have
    y = torch.randn(len(of_token), 48, generator=generator)
    expected = y.double().clone()
    for token, adapter in enumerate(of_token):
        if adapter in (0, 1) and ids[token] < 300:
            a, b = (factor.double() for factor in factors[adapter])
            expected[token] += b @ a[:, ids[token]]
    sums = torch.full((sums_numel(pool, len(of_token), MAX_RANK, TUNING),), float("nan"), device=DEVICE)
    got = y.to(DEVICE, copy=True)
    add_lora_embedding(got, ids.to(DEVICE), 0, pool, device_plan(of_token, placed), sums, MAX_RANK, TUNING)
    assert (got.cpu().double() - expected).abs().max() <= 1e-5
