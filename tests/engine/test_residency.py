"""The account of adapter memory, against one that answers when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from manylora.engine.residency import (
    AdapterLoadFailed,
    AdapterMemoryFull,
    AdapterNotOnDisk,
    Loaded,
    MakeRoom,
    Residency,
    Resident,
)

FOLDER = Path("/tier/digest")


class FakeMemory:
    """Holds adapters up to `budget` bytes, 10 each unless `sizes` says otherwise.

    A load waits for `gate`, and fails where `failing` has its name.
    """

    def __init__(self, budget: int = 1 << 30) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing: dict[str, Exception] = {}
        self.budget, self.sizes = budget, dict[str, int]()
        self.in_memory: dict[int, str] = {}
        self.loads: list[str] = []
        self.drops: list[int] = []
        self.measures: list[str] = []
        self.crooked = 0

    def size(self, engine_name: str) -> int:
        return self.sizes.get(engine_name, 10)

    @property
    def used(self) -> int:
        return sum(map(self.size, self.in_memory.values()))

    async def budget_bytes(self) -> int:
        return self.budget

    async def measure(self, engine_name: str, folder: Path) -> int:
        self.measures.append(engine_name)
        await asyncio.sleep(0)
        return self.size(engine_name)

    async def load(self, lora_id: int, engine_name: str, folder: Path, make_room: MakeRoom) -> Loaded:
        self.loads.append(engine_name)
        await self.gate.wait()
        if engine_name in self.failing:
            raise self.failing[engine_name]
        assert self.used + self.size(engine_name) <= self.budget, "the account has room for it"
        while self.crooked:
            self.crooked -= 1
            await make_room()
        self.in_memory[lora_id] = engine_name
        return Loaded(nbytes=self.size(engine_name), seconds=0.5, source="host")

    async def drop(self, lora_id: int) -> int:
        self.drops.append(lora_id)
        await asyncio.sleep(0)
        return self.size(self.in_memory.pop(lora_id))


class Counts:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def loaded(self, seconds: float, source: str) -> None:
        self.events.append("loaded")

    def load_failed(self) -> None:
        self.events.append("load_failed")

    def hit(self) -> None:
        self.events.append("hit")

    def evicted(self, reason: str) -> None:
        self.events.append(f"evicted {reason}")

    def waited(self, seconds: float) -> None:
        assert seconds >= 0


class World:
    """One account with everything around it."""

    def __init__(self, places: int = 2, wait_s: float = 0.2, budget: int = 1 << 30) -> None:
        self.memory, self.counts, self.served = FakeMemory(budget), Counts(), set[str]()
        self.account = Residency(
            self.memory,
            places=places,
            wait_s=wait_s,
            observer=self.counts,
            published=self._published,
            policy="lru",
        )

    def _published(self, resident: Resident, present: bool) -> None:
        (self.served.add if present else self.served.discard)(resident.engine_name)

    async def use(self, name: str, find: Callable[[], Path | None] = lambda: FOLDER) -> int:
        async with self.account.lease(name, find) as resident:
            assert self.memory.in_memory[resident.lora_id] == name
            assert name in self.served
            await asyncio.sleep(0)
            assert self.memory.in_memory[resident.lora_id] == name
            return resident.lora_id


async def test_concurrent_requests_share_one_load() -> None:
    world = World()
    ids = await asyncio.gather(*(world.use("a") for _ in range(10)))
    assert len(set(ids)) == 1
    assert world.memory.loads == ["a"]


async def test_least_recently_used_leaves_first() -> None:
    world = World(places=2)
    for name in ("a", "b", "a", "c"):
        await world.use(name)
    assert sorted(world.memory.in_memory.values()) == ["a", "c"]
    assert world.served == {"a", "c"}
    assert "evicted room" in world.counts.events


async def test_leased_adapter_is_never_evicted() -> None:
    world = World(places=1)
    async with world.account.lease("a", lambda: FOLDER) as held:
        with pytest.raises(AdapterMemoryFull, match="max-cpu-loras"):
            await world.use("b")
        assert world.memory.in_memory == {held.lora_id: "a"}
    await world.use("b")
    assert list(world.memory.in_memory.values()) == ["b"]


async def test_waiters_get_the_place_in_the_order_they_came() -> None:
    world = World(places=1, wait_s=5)
    order: list[str] = []

    async def request(name: str) -> None:
        async with world.account.lease(name, lambda: FOLDER):
            order.append(name)
            await asyncio.sleep(0.001)

    async with world.account.lease("hot", lambda: FOLDER):
        waiting = [asyncio.create_task(request(name)) for name in "abcdef"]
        await asyncio.sleep(0.01)
    await asyncio.gather(*waiting)
    assert order == list("abcdef")


async def test_failed_load_fails_its_own_requests_only_and_is_tried_anew() -> None:
    world = World()
    world.memory.failing["bad"] = AdapterLoadFailed("rank 128 is too large")
    results = await asyncio.gather(
        world.use("bad"), world.use("good"), world.use("bad"), world.use("good"), return_exceptions=True
    )
    assert [isinstance(r, AdapterLoadFailed) for r in results] == [True, False, True, False]
    assert world.served == {"good"}
    del world.memory.failing["bad"]
    await world.use("bad")
    assert world.memory.loads.count("bad") == 2


async def test_unexpected_failure_is_a_load_failure() -> None:
    world = World()
    world.memory.failing["bad"] = RuntimeError("boom")
    with pytest.raises(AdapterLoadFailed, match="boom"):
        await world.use("bad")
    assert world.account.residents() == []


async def test_missing_folder_is_its_own_error_and_leaves_nothing() -> None:
    world = World()
    with pytest.raises(AdapterNotOnDisk):
        await world.use("a", lambda: None)
    assert world.account.residents() == []
    await world.use("a")


async def test_abort_during_a_load_keeps_the_load_for_others() -> None:
    world = World()
    world.memory.gate.clear()
    first, second = asyncio.create_task(world.use("a")), asyncio.create_task(world.use("a"))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0)
    world.memory.gate.set()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert [r.in_flight for r in world.account.residents()] == [0]
    assert world.memory.loads == ["a"]


async def test_abort_of_everybody_during_a_load_leaves_an_evictable_adapter() -> None:
    world = World(places=1)
    world.memory.gate.clear()
    only = asyncio.create_task(world.use("a"))
    await asyncio.sleep(0.01)
    only.cancel()
    await asyncio.sleep(0)
    world.memory.gate.set()
    await world.use("b")
    assert list(world.memory.in_memory.values()) == ["b"]


async def test_evict_waits_for_running_requests_and_frees() -> None:
    world = World()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(world.account.lease("a", lambda: FOLDER))
        evicting = asyncio.create_task(world.account.evict("a"))
        await asyncio.sleep(0.01)
        assert not evicting.done()
    assert await evicting == 10
    assert world.memory.in_memory == {}
    assert world.served == set()
    assert await world.account.evict("a") is None


async def test_request_during_an_eviction_loads_anew_under_a_new_id() -> None:
    world = World()
    first = await world.use("a")
    evicting = asyncio.create_task(world.account.evict("a"))
    await asyncio.sleep(0)
    assert await world.use("a") != first
    assert await evicting == 10


async def test_cancelled_evict_leaves_the_adapter_in_service() -> None:
    world = World()
    async with world.account.lease("a", lambda: FOLDER):
        evicting = asyncio.create_task(world.account.evict("a"))
        await asyncio.sleep(0)
        evicting.cancel()
        await world.use("a")
    await world.use("a")
    assert world.memory.loads == ["a"]


async def test_many_adapters_over_few_places_under_load() -> None:
    world = World(places=3, wait_s=20)

    async def client(seed: int) -> None:
        for step in range(40):
            await world.use(f"adapter-{(seed * 7 + step * 3) % 17}")

    await asyncio.gather(*(client(seed) for seed in range(3)))
    assert len(world.account.residents()) <= 3
    assert len(world.memory.in_memory) == len(world.account.residents())
    assert all(r.in_flight == 0 for r in world.account.residents())


# ---- what was read does not fit ----


async def test_the_least_recently_used_leave_until_it_fits() -> None:
    world = World(places=10, budget=40)
    for name in ("a", "b", "c", "d", "a"):
        await world.use(name)
    world.memory.sizes["large"] = 25
    await world.use("large")
    assert sorted(world.memory.in_memory.values()) == ["a", "large"]
    assert world.served == {"a", "large"}
    assert world.counts.events.count("evicted room") == 3
    assert sorted(r.engine_name for r in world.account.residents()) == ["a", "large"]


async def test_what_is_leased_stays_while_room_is_made() -> None:
    world = World(places=10, budget=30)
    async with world.account.lease("oldest", lambda: FOLDER) as held:
        await world.use("b")
        await world.use("c")
        await world.use("d")
        assert held.lora_id in world.memory.in_memory
        assert sorted(world.memory.in_memory.values()) == ["c", "d", "oldest"]


async def test_a_load_waits_for_a_lease_to_end() -> None:
    world = World(places=10, wait_s=5, budget=10)
    async with world.account.lease("a", lambda: FOLDER):
        waiting = asyncio.create_task(world.use("b"))
        await asyncio.sleep(0.01)
        assert list(world.memory.in_memory.values()) == ["a"]
    await waiting
    assert list(world.memory.in_memory.values()) == ["b"]


async def test_all_of_it_leased_is_full_at_the_deadline() -> None:
    world = World(places=10, wait_s=0.1, budget=10)
    async with world.account.lease("a", lambda: FOLDER):
        began = asyncio.get_running_loop().time()
        with pytest.raises(AdapterMemoryFull, match="--adapter-memory"):
            await world.use("b")
        assert 0.1 <= asyncio.get_running_loop().time() - began < 1
        assert [r.engine_name for r in world.account.residents()] == ["a"]
        assert world.served == {"a"}
    await world.use("b")
    assert list(world.memory.in_memory.values()) == ["b"]


async def test_leases_that_come_and_go_do_not_prolong_the_deadline() -> None:
    world = World(places=10, wait_s=0.1, budget=10)

    async def keep_busy() -> None:
        while True:
            async with world.account.lease("a", lambda: FOLDER):
                await asyncio.sleep(0.01)

    async with world.account.lease("a", lambda: FOLDER):
        busy = asyncio.create_task(keep_busy())
        with pytest.raises(AdapterMemoryFull):
            await asyncio.wait_for(world.use("b"), 2)
        busy.cancel()


async def test_many_adapters_of_many_sizes_over_little_memory() -> None:
    world = World(places=100, wait_s=20, budget=100)
    names = [f"adapter-{number}" for number in range(17)]
    world.memory.sizes = {name: 5 + 7 * number % 31 for number, name in enumerate(names)}

    async def client(seed: int) -> None:
        for step in range(40):
            await world.use(names[(seed * 7 + step * 3) % len(names)])
            assert world.memory.used <= world.memory.budget

    await asyncio.gather(*(client(seed) for seed in range(3)))
    assert "evicted room" in world.counts.events
    assert len(world.memory.in_memory) == len(world.account.residents())
    assert world.served == set(world.memory.in_memory.values())
    assert all(r.in_flight == 0 for r in world.account.residents())


async def test_a_version_is_measured_once_and_what_was_measured_is_not_measured_again() -> None:
    world = World(places=1)
    await asyncio.gather(world.use("a"), world.use("a"))
    await world.use("b")
    await world.use("a")
    assert world.memory.measures == ["a", "b"]
    assert world.memory.loads == ["a", "b", "a"]


async def test_a_version_that_cannot_be_measured_fails_its_own_requests() -> None:
    world = World()

    async def fail(engine_name: str, folder: Path) -> int:
        raise AdapterLoadFailed("rank 128 is too large")

    measure, world.memory.measure = world.memory.measure, fail  # type: ignore[method-assign]
    results = await asyncio.gather(world.use("bad"), world.use("bad"), return_exceptions=True)
    assert all(isinstance(result, AdapterLoadFailed) for result in results)
    assert world.counts.events == ["load_failed"]
    world.memory.measure = measure  # type: ignore[method-assign]
    await world.use("bad")


async def test_what_is_larger_than_all_memory_is_told_at_once() -> None:
    world = World(budget=100)
    world.memory.sizes["huge"] = 101
    with pytest.raises(AdapterLoadFailed, match="takes 101 bytes, and adapter memory has 100"):
        await world.use("huge")
    assert world.memory.loads == []


async def test_room_that_only_the_account_sees_is_made() -> None:
    """Tables may be fragmented where bytes are free: another one that is idle leaves."""
    world = World(places=10)
    await world.use("a")
    await world.use("b")
    world.memory.crooked = 1
    await world.use("c")
    assert sorted(world.memory.in_memory.values()) == ["b", "c"]
    assert world.served == {"b", "c"}


async def test_a_request_that_leaves_the_line_makes_way() -> None:
    world = World(places=1, wait_s=5)
    async with world.account.lease("hot", lambda: FOLDER):
        first, second = asyncio.create_task(world.use("a")), asyncio.create_task(world.use("b"))
        await asyncio.sleep(0.01)
        assert world.account.waiting() == 2
        first.cancel()
        await asyncio.sleep(0.01)
        assert world.account.waiting() == 1
    await second
    assert world.memory.loads == ["hot", "b"]
    assert world.account.waiting() == 0


async def test_a_hot_adapter_that_is_never_idle_is_drained_for_one_that_waits() -> None:
    """Requests for the hot one overlap for ever; the cold one is served all the same, soon after its patience ends."""
    world = World(places=1, wait_s=30)
    stop = asyncio.Event()

    async def keep_hot() -> None:
        while not stop.is_set():
            async with world.account.lease("hot", lambda: FOLDER):
                await asyncio.sleep(0.02)

    hot = [asyncio.create_task(keep_hot())]
    await asyncio.sleep(0.01)
    hot.append(asyncio.create_task(keep_hot()))
    admission = await world.account._account()
    admission.patience_s = 0.2
    began = asyncio.get_running_loop().time()
    await world.use("cold")
    assert 0.2 <= asyncio.get_running_loop().time() - began < 2
    stop.set()
    await asyncio.gather(*hot)


async def test_a_failed_load_lets_those_in_who_wait() -> None:
    world = World(places=1, wait_s=5)
    world.memory.failing["bad"] = AdapterLoadFailed("no")
    world.memory.gate.clear()
    bad = asyncio.create_task(world.use("bad"))
    await asyncio.sleep(0.01)
    good = asyncio.create_task(world.use("good"))
    await asyncio.sleep(0.01)
    world.memory.gate.set()
    await good
    with pytest.raises(AdapterLoadFailed):
        await bad
    assert world.account.waiting() == 0


async def test_random_comings_and_goings_leave_a_clean_account() -> None:
    """Aborts, failures and evictions at random: in the end nobody waits, nothing is pinned, both sides agree."""
    import random

    chance = random.Random(5)
    world = World(places=100, wait_s=0.05, budget=60)
    names = [f"adapter-{number}" for number in range(12)]
    world.memory.sizes = {name: 5 + 11 * number % 37 for number, name in enumerate(names)}
    world.memory.failing = {"adapter-3": AdapterLoadFailed("no"), "adapter-7": RuntimeError("boom")}

    async def client() -> None:
        for _ in range(60):
            task = asyncio.create_task(world.use(chance.choice(names)))
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.003)
                task.cancel()
            await asyncio.wait([task])
            if chance.random() < 0.1:
                await world.account.evict(chance.choice(names))

    await asyncio.gather(*(client() for _ in range(6)))
    await asyncio.sleep(0.01)
    admission = await world.account._account()
    admission.check_invariants()
    assert admission.pinned() == set()
    assert world.account.waiting() == 0
    assert world.account._out == set()
    assert {r.engine_name for r in world.account.residents()} == set(world.memory.in_memory.values()) == world.served
    assert all(r.in_flight == 0 for r in world.account.residents())


async def test_a_folder_is_looked_for_once_and_again_when_it_has_gone(tmp_path: Path) -> None:
    world = World(places=1)
    looked: list[str] = []
    folder = tmp_path / "digest"

    def find() -> Path | None:
        looked.append("a")
        return folder if folder.is_dir() else None

    folder.mkdir()
    for name in ("a", "b", "a"):
        await world.use(name, find if name == "a" else lambda: FOLDER)
    assert looked == ["a"]
    await world.use("b")
    folder.rmdir()
    with pytest.raises(AdapterNotOnDisk):
        await world.use("a", find)
    assert looked == ["a", "a"]
