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

    def size(self, engine_name: str) -> int:
        return self.sizes.get(engine_name, 10)

    @property
    def used(self) -> int:
        return sum(map(self.size, self.in_memory.values()))

    async def load(self, lora_id: int, engine_name: str, folder: Path, make_room: MakeRoom) -> Loaded:
        self.loads.append(engine_name)
        await self.gate.wait()
        if engine_name in self.failing:
            raise self.failing[engine_name]
        while self.used + self.size(engine_name) > self.budget:
            await make_room()
        self.in_memory[lora_id] = engine_name
        return Loaded(nbytes=self.size(engine_name), seconds=0.5)

    async def drop(self, lora_id: int) -> int:
        self.drops.append(lora_id)
        await asyncio.sleep(0)
        return self.size(self.in_memory.pop(lora_id))


class Counts:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def loaded(self, seconds: float) -> None:
        self.events.append("loaded")

    def load_failed(self) -> None:
        self.events.append("load_failed")

    def hit(self) -> None:
        self.events.append("hit")

    def evicted(self, reason: str) -> None:
        self.events.append(f"evicted {reason}")


class World:
    """One account with everything around it."""

    def __init__(self, places: int = 2, wait_s: float = 0.2, budget: int = 1 << 30) -> None:
        self.memory, self.counts, self.served = FakeMemory(budget), Counts(), set[str]()
        self.now = 0.0
        self.account = Residency(
            self.memory,
            places=places,
            wait_s=wait_s,
            observer=self.counts,
            published=self._published,
            clock=self._tick,
        )

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

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
    assert "evicted lru" in world.counts.events


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
    await asyncio.sleep(0)
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
    await asyncio.sleep(0)
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
    assert world.counts.events.count("evicted lru") == 3
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
    assert world.counts.events[-1] == "load_failed"
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
    assert "evicted lru" in world.counts.events
    assert len(world.memory.in_memory) == len(world.account.residents())
    assert world.served == set(world.memory.in_memory.values())
    assert all(r.in_flight == 0 for r in world.account.residents())
