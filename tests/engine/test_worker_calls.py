"""A load over several workers: every one takes the adapter in, or none keeps it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from manylora.engine.residency import AdapterLoadFailed, AdapterMemoryFull, Loaded
from manylora.engine.worker_calls import FAILED, FULL, PENDING, READY, WorkerMemory
from manylora.errors import Unavailable

PENDING_, FULL_ = {"state": PENDING}, {"state": FULL}


def ready(nbytes: int = 100, seconds: float = 0.5, unknown: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"state": READY, "bytes": nbytes, "seconds": seconds, "unknown": list(unknown)}


class FakeEngine:
    """Workers that answer `manylora_register` from a script each, and then as one that has said its last word."""

    def __init__(self, *scripts: list[dict[str, Any]]) -> None:
        self.scripts = [list(script) for script in scripts]
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.error: Exception | None = None

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append((method, args))
        if self.error is not None:
            raise self.error
        await asyncio.sleep(0)
        if method == "manylora_register":
            return [script.pop(0) if script else PENDING_ for script in self.scripts]
        if method == "manylora_forget":
            return [90 + worker for worker in range(len(self.scripts))]
        if method == "manylora_residency":
            return [{"adapters": [worker]} for worker in range(len(self.scripts))]
        return [None] * len(self.scripts)

    def names(self) -> list[str]:
        return [method.removeprefix("manylora_") for method, _ in self.calls]


class Room:
    """Counts how often room was made."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made, self.error = 0, error

    async def __call__(self) -> None:
        if self.error is not None:
            raise self.error
        self.made += 1


async def load(engine: FakeEngine, room: Room, timeout_s: float = 5.0) -> Loaded:
    return await WorkerMemory(engine, timeout_s=timeout_s).load(7, "a/b@v1-0", Path("/tier/x"), room)


async def test_a_load_is_begun_once_and_asked_for_until_it_is_there() -> None:
    engine, room = FakeEngine([PENDING_, PENDING_, ready(100, 0.5)]), Room()
    assert await load(engine, room) == Loaded(100, 0.5)
    assert engine.names() == ["prepare", "register", "register", "register"]
    assert engine.calls[0][1] == (7, "a/b@v1-0", "/tier/x")
    assert room.made == 0


async def test_workers_may_be_done_at_different_times_and_the_largest_counts() -> None:
    engine = FakeEngine([ready(100, 0.5)], [PENDING_, PENDING_, ready(300, 0.2)])
    assert await load(engine, Room()) == Loaded(300, 0.5)


async def test_room_is_made_until_it_fits() -> None:
    engine, room = FakeEngine([PENDING_, FULL_, FULL_, ready()]), Room()
    assert await load(engine, room) == Loaded(100, 0.5)
    assert room.made == 2
    assert "forget" not in engine.names()


async def test_room_is_made_for_whichever_worker_is_full() -> None:
    engine, room = FakeEngine([ready()], [PENDING_, FULL_, ready(200)]), Room()
    assert await load(engine, room) == Loaded(200, 0.5)
    assert room.made == 1


async def test_no_room_drops_what_was_read() -> None:
    engine = FakeEngine([ready()], [FULL_])
    with pytest.raises(AdapterMemoryFull):
        await load(engine, Room(AdapterMemoryFull("all leased")))
    assert engine.calls[-1] == ("manylora_forget", (7,))


async def test_one_worker_that_fails_fails_the_load_and_drops_it_everywhere() -> None:
    engine = FakeEngine([ready()], [PENDING_, {"state": FAILED, "reason": "rank 128 is too large"}])
    with pytest.raises(AdapterLoadFailed, match="rank 128 is too large"):
        await load(engine, Room())
    assert engine.calls[-1] == ("manylora_forget", (7,))


async def test_a_module_must_exist_on_some_worker() -> None:
    assert await load(FakeEngine([ready(unknown=("x", "y"))], [ready(unknown=("z",))]), Room())
    engine = FakeEngine([ready(unknown=("a", "b", "c", "d"))], [ready(unknown=("d", "c", "b", "a", "e"))])
    with pytest.raises(AdapterLoadFailed, match="no such module in this model: a, b, c and 1 more"):
        await load(engine, Room())
    assert engine.calls[-1] == ("manylora_forget", (7,))


async def test_a_read_that_takes_too_long_is_dropped() -> None:
    engine = FakeEngine([PENDING_])
    with pytest.raises(AdapterLoadFailed, match=r"longer than 0\.02 s"):
        await load(engine, Room(), timeout_s=0.02)
    assert engine.calls[-1] == ("manylora_forget", (7,))


async def test_a_cancelled_load_is_dropped() -> None:
    engine = FakeEngine([PENDING_])
    loading = asyncio.create_task(load(engine, Room()))
    await asyncio.sleep(0.01)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert engine.calls[-1] == ("manylora_forget", (7,))


async def test_drop_says_what_the_fullest_worker_freed() -> None:
    assert await WorkerMemory(FakeEngine([], []), timeout_s=1).drop(7) == 91


async def test_residency_is_the_first_workers() -> None:
    assert await WorkerMemory(FakeEngine([], []), timeout_s=1).residency() == {"adapters": [0]}


async def test_an_engine_that_does_not_answer_is_unavailable() -> None:
    engine = FakeEngine([])
    engine.error = RuntimeError("dead")
    with pytest.raises(Unavailable, match="did not answer manylora_prepare: RuntimeError"):
        await load(engine, Room())


def test_states_are_told_apart() -> None:
    assert len({PENDING, FULL, READY, FAILED}) == 4
