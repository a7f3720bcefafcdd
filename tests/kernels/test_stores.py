"""What both stores promise: an adapter is there whole or not at all, and what it takes is given back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from manylora.errors import InvalidAdapter, Unavailable  # noqa: E402
from manylora.kernels.exact import pack_exact  # noqa: E402
from manylora.kernels.packing import Factors, pack  # noqa: E402
from manylora.kernels.pages import Module  # noqa: E402
from manylora.kernels.pool import PoolFull  # noqa: E402
from manylora.kernels.stores import AdapterStore, ExactStore, PagedStore  # noqa: E402

MODULES = (Module("qkv", 256, (256, 64, 64)), Module("down", 704, (256,)))
QKV, DOWN = range(len(MODULES))
Weights = dict[int, list[Factors | None]]
Make = Callable[[int], AdapterStore]


def paged(budget_bytes: int) -> PagedStore:
    return PagedStore(MODULES, budget_bytes, torch.float32, torch.device("cpu"))


def exact(budget_bytes: int) -> ExactStore:
    return ExactStore(MODULES, budget_bytes)


BOTH = pytest.mark.parametrize("make", [paged, exact], ids=["paged", "exact"])


def weights(lora_rank: int, *numbers: int) -> Weights:
    return {
        number: [
            (torch.randn(lora_rank, MODULES[number].in_features), torch.randn(width, lora_rank))
            for width in MODULES[number].widths
        ]
        for number in numbers or (QKV, DOWN)
    }


def packed_for(store: Any, factors: Weights) -> Any:
    """In the form that a store takes."""
    if isinstance(store, PagedStore):
        return pack(store.pool.layout, factors, store.pool.pages.dtype)
    return pack_exact(store.modules, factors)


def state(store: Any) -> tuple[object, ...]:
    """All that a refused `place` must leave as it was."""
    if isinstance(store, ExactStore):
        return store.version, store.used_bytes, dict(store.adapters)
    return (
        store.version,
        store.used_bytes,
        dict(store.slots),
        store.users.tolist(),
        store.tables.tolist(),
        store.rank_blocks.tolist(),
        store.pool.table.tolist(),
    )


@BOTH
def test_an_adapter_comes_and_goes(make: Make) -> None:
    store = make(1 << 20)
    assert (store.version, store.used_bytes) == (0, 0)
    packed = packed_for(store, weights(8))
    assert (store.version, store.used_bytes) == (0, 0)
    store.place(7, packed)
    assert (store.version, store.used_bytes) == (1, packed.nbytes)
    assert store.remove(7) == packed.nbytes
    assert (store.version, store.used_bytes) == (2, 0)


@BOTH
def test_what_is_not_there_frees_nothing(make: Make) -> None:
    store = make(1 << 20)
    assert store.remove(7) == 0
    assert store.version == 0


@BOTH
def test_the_budget_is_kept_to(make: Make) -> None:
    store = make(1 << 20)
    assert (1 << 20) - (1 << 16) < store.budget_bytes <= 1 << 20
    packed = packed_for(store, weights(8))
    placed = 0
    while True:
        before = state(store)
        try:
            store.place(placed + 1, packed)
        except PoolFull:
            break
        placed += 1
    assert state(store) == before
    assert placed == store.budget_bytes // packed.nbytes
    assert store.budget_bytes - packed.nbytes < store.used_bytes <= store.budget_bytes
    store.remove(1)
    store.place(placed + 1, packed)


@BOTH
def test_what_can_never_fit_is_refused_with_a_hint(make: Make) -> None:
    store = make(200_000)
    before = state(store)
    packed = packed_for(store, weights(64))
    with pytest.raises(Unavailable, match=r"needs \d+ bytes, all adapter memory has \d+") as caught:
        store.place(1, packed)
    assert not isinstance(caught.value, PoolFull)
    assert "--adapter-memory" in caught.value.hint
    assert state(store) == before


@BOTH
def test_an_adapter_without_weights_takes_nothing(make: Make) -> None:
    store = make(200_000)
    for lora_id in range(1, 2000):
        store.place(lora_id, packed_for(store, {}))
    assert (store.used_bytes, store.version) == (0, 1999)
    assert store.remove(1) == 0
    assert store.version == 2000


@BOTH
def test_what_does_not_fit_the_model_is_refused_when_it_is_packed(make: Make) -> None:
    with pytest.raises(InvalidAdapter, match="down takes lora_A of 704 columns"):
        packed_for(make(1 << 20), {DOWN: [(torch.zeros(8, 705), torch.zeros(256, 8))]})


@BOTH
def test_bytes_add_up_under_churn(make: Make) -> None:
    draw = random.Random(3)
    store, held, refused, changes = make(600_000), dict[int, int](), 0, 0
    for lora_id in range(1, 200):
        if held and draw.random() < 0.45:
            gone = draw.choice(list(held))
            assert store.remove(gone) == held.pop(gone)
            changes += 1
        packed = packed_for(
            store, weights(draw.choice([1, 4, 8, 12, 33]), *draw.choice([(QKV, DOWN), (QKV,), (DOWN,)]))
        )
        try:
            store.place(lora_id, packed)
            held[lora_id] = packed.nbytes
            changes += 1
        except PoolFull:
            refused += 1
        assert store.used_bytes == sum(held.values()) <= store.budget_bytes
        assert store.version == changes
    assert refused > 0
    for lora_id in held:
        store.remove(lora_id)
    assert store.used_bytes == 0


# ---- only paged ----


def test_a_slot_names_the_adapters_table_and_is_used_again() -> None:
    store = paged(1 << 20)
    for lora_id, lora_rank in ((1, 8), (2, 20)):
        store.place(lora_id, packed_for(store, weights(lora_rank)))
    first, second = store.slots[1], store.slots[2]
    assert first != second
    assert [store.rank_blocks[slot] for slot in (first, second)] == [1, 3]
    assert store.tables[first] != store.tables[second]
    store.remove(1)
    assert list(store.slots) == [2]
    store.place(3, packed_for(store, weights(16)))
    assert store.slots == {2: second, 3: first}
    assert store.rank_blocks[first] == 2


def test_more_adapters_than_slots_at_first() -> None:
    store = paged(40 << 20)
    packed = packed_for(store, {DOWN: [(torch.ones(1, 704), torch.ones(256, 1))]})
    assert 1100 * packed.nbytes < store.budget_bytes
    for lora_id in range(1, 1101):
        store.place(lora_id, packed)
    assert sorted(store.slots.values()) == list(range(1100))
    tables = [int(store.tables[slot]) for slot in store.slots.values()]
    assert len(set(tables)) == 1100
    assert all(store.rank_blocks[slot] == 1 for slot in store.slots.values())
    for lora_id in range(1, 1101, 2):
        store.remove(lora_id)
    for lora_id in range(2001, 2551):
        store.place(lora_id, packed)
    assert sorted(store.slots.values()) == list(range(1100))


def test_users_are_the_adapters_that_change_a_module() -> None:
    store = paged(1 << 20)
    only_values: Weights = {QKV: [None, None, weights(4, QKV)[QKV][2]], DOWN: [None]}
    for lora_id, each in ((1, weights(8)), (2, weights(8, DOWN)), (3, only_values), (4, {})):
        store.place(lora_id, packed_for(store, each))
    assert store.users.tolist() == [2, 2]
    store.remove(1)
    assert store.users.tolist() == [1, 1]
    store.remove(3)
    assert store.users.tolist() == [0, 1]


def test_a_pool_for_nothing_is_refused() -> None:
    with pytest.raises(Unavailable, match="holds no adapter of rank 8"):
        paged(10_000)
