"""A load over several workers: every one takes the adapter in, or none keeps it. Workers are real sockets' ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manylora.engine import load_channel
from manylora.engine.load_channel import FAILED, FULL, MEASURE, READY, Load, LoadServer, Outcome, socket_path
from manylora.engine.residency import AdapterLoadFailed, AdapterMemoryFull, Loaded
from manylora.engine.worker_calls import WorkerMemory
from manylora.errors import Unavailable

NEVER = Outcome(0, "never")
FULL_ = Outcome(0, FULL)


def ready(nbytes: int = 100, seconds: float = 0.5, unknown: tuple[str, ...] = (), source: str = "host") -> Outcome:
    return Outcome(0, READY, nbytes, seconds, source, unknown)


class FakeEngine:
    """Workers that answer loads from a script each, over sockets; and vLLM's calls to all of them."""

    def __init__(self, folder: Path, *scripts: list[Outcome]) -> None:
        self.scripts = [list(script) for script in scripts]
        self.loads: list[list[Load]] = [[] for _ in scripts]
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.error: Exception | None = None
        self.end = threading.Event()
        self.paths = [folder / f"{number}.sock" for number in range(len(scripts))]
        self.servers = [LoadServer(path, self._handler(number)) for number, path in enumerate(self.paths)]

    def _handler(self, number: int) -> load_channel.Handle:
        def handle(load: Load) -> Outcome:
            self.loads[number].append(load)
            outcome = self.scripts[number].pop(0)
            if outcome is NEVER:
                self.end.wait(10)
            return msgspec.structs.replace(outcome, number=load.number)

        return handle

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append((method, args))
        if self.error is not None:
            raise self.error
        await asyncio.sleep(0)
        if method == "manylora_listen":
            return [str(path) for path in self.paths]
        if method == "manylora_forget":
            return [90 + worker for worker in range(len(self.scripts))]
        return [{"adapters": [worker], "budget_bytes": 1000 - worker} for worker in range(len(self.scripts))]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    made: list[FakeEngine] = []

    def make(*scripts: list[Outcome]) -> FakeEngine:
        made.append(FakeEngine(tmp_path, *scripts))
        return made[-1]

    yield make
    for each in made:
        each.end.set()


class Room:
    """Counts how often room was made."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made, self.error = 0, error

    async def __call__(self) -> None:
        if self.error is not None:
            raise self.error
        self.made += 1


def memory(engine: FakeEngine, timeout_s: float = 5.0) -> WorkerMemory:
    OPEN.append(WorkerMemory(engine, run_dir=Path("/run"), timeout_s=timeout_s))
    return OPEN[-1]


OPEN: list[WorkerMemory] = []


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    while OPEN:
        await OPEN.pop().close()


async def load(engine: FakeEngine, room: Room, timeout_s: float = 5.0) -> Loaded:
    return await memory(engine, timeout_s).load(7, "a/b@v1-0", Path("/tier/x"), room)


async def test_a_load_is_one_question_to_each_worker_and_none_to_the_step_loop(engine: Any) -> None:
    one, room = engine([ready(100, 0.5)]), Room()
    assert await load(one, room) == Loaded(100, 0.5, "host")
    assert one.calls == [("manylora_listen", ("/run",))]
    assert one.loads == [[Load(1, 7, "a/b@v1-0", "/tier/x")]]
    assert room.made == 0


async def test_the_channel_is_opened_once(engine: Any) -> None:
    one = engine([ready(), ready()])
    workers = memory(one)
    await asyncio.gather(*(workers.load(number, "a/b@v1-0", Path("/tier/x"), Room()) for number in (1, 2)))
    assert [method for method, _ in one.calls] == ["manylora_listen"]


async def test_loads_that_come_together_share_one_connection(tmp_path: Path) -> None:
    """With several, the loads of all but one would fail as soon as the others' readers are collected."""
    path = tmp_path / "w.sock"
    server = LoadServer(path, lambda load: msgspec.structs.replace(ready(), number=load.number))
    client = load_channel.LoadClient(path)
    outcomes = await asyncio.gather(*(client.load(n, "a/b@v1-0", Path("/tier/x")) for n in range(1, 20)))
    assert {outcome.state for outcome in outcomes} == {READY}
    assert server.connections == 1
    await client.close()


async def test_the_largest_and_the_slowest_worker_count(engine: Any) -> None:
    two = engine([ready(100, 0.5, source="folder")], [ready(300, 0.2)])
    assert await load(two, Room()) == Loaded(300, 0.5, "folder")


async def test_room_is_made_until_it_fits(engine: Any) -> None:
    one, room = engine([FULL_, FULL_, ready()]), Room()
    assert await load(one, room) == Loaded(100, 0.5, "host")
    assert room.made == 2
    assert len(one.calls) == 1


async def test_room_is_made_for_whichever_worker_is_full_and_only_it_is_asked_again(engine: Any) -> None:
    two, room = engine([ready()], [FULL_, ready(200)]), Room()
    assert await load(two, room) == Loaded(200, 0.5, "host")
    assert room.made == 1
    assert [len(loads) for loads in two.loads] == [1, 2]


async def test_no_room_drops_what_was_read(engine: Any) -> None:
    two = engine([ready()], [FULL_])
    with pytest.raises(AdapterMemoryFull):
        await load(two, Room(AdapterMemoryFull("all leased")))
    assert two.calls[-1] == ("manylora_forget", (7,))


async def test_one_worker_that_fails_fails_the_load_and_drops_it_everywhere(engine: Any) -> None:
    two = engine([ready()], [Outcome(0, FAILED, reason="rank 128 is too large")])
    with pytest.raises(AdapterLoadFailed, match="rank 128 is too large"):
        await load(two, Room())
    assert two.calls[-1] == ("manylora_forget", (7,))


async def test_a_module_may_be_on_one_worker_only(engine: Any) -> None:
    assert await load(engine([ready(unknown=("x", "y"))], [ready(unknown=("z",))]), Room())


async def test_a_module_must_exist_on_some_worker(engine: Any) -> None:
    two = engine([ready(unknown=("a", "b", "c", "d"))], [ready(unknown=("d", "c", "b", "a", "e"))])
    with pytest.raises(AdapterLoadFailed, match="no such module in this model: a, b, c and 1 more"):
        await load(two, Room())
    assert two.calls[-1] == ("manylora_forget", (7,))


async def test_a_read_that_takes_too_long_is_dropped(engine: Any) -> None:
    one = engine([NEVER])
    with pytest.raises(AdapterLoadFailed, match=r"longer than 0\.05 s"):
        await load(one, Room(), timeout_s=0.05)
    assert one.calls[-1] == ("manylora_forget", (7,))


async def test_a_cancelled_load_is_dropped(engine: Any) -> None:
    one = engine([NEVER])
    loading = asyncio.create_task(load(one, Room()))
    await asyncio.sleep(0.05)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert one.calls[-1] == ("manylora_forget", (7,))


async def test_drop_says_what_the_fullest_worker_freed(engine: Any) -> None:
    assert await memory(engine([], [])).drop(7) == 91


async def test_residency_is_the_first_workers(engine: Any) -> None:
    assert await memory(engine([], [])).residency() == {"adapters": [0], "budget_bytes": 1000}


async def test_the_smallest_workers_memory_is_the_budget_and_the_largest_share_the_size(engine: Any) -> None:
    two = engine([ready(100, unknown=("x",))], [ready(300)])
    assert await memory(two).budget_bytes() == 999
    assert await memory(two).measure("a/b@v1-0", Path("/tier/x")) == 300
    assert [loads[0].lora_id for loads in two.loads] == [MEASURE, MEASURE]


async def test_what_cannot_be_measured_is_a_failed_load_and_nothing_to_drop(engine: Any) -> None:
    two = engine([ready()], [Outcome(0, FAILED, reason="rank 128 is too large")])
    with pytest.raises(AdapterLoadFailed, match="rank 128 is too large"):
        await memory(two).measure("a/b@v1-0", Path("/tier/x"))
    assert [method for method, _ in two.calls] == ["manylora_listen"]


async def test_an_engine_that_does_not_answer_is_unavailable(engine: Any) -> None:
    one = engine([])
    one.error = RuntimeError("dead")
    with pytest.raises(Unavailable, match="did not answer manylora_listen: RuntimeError"):
        await load(one, Room())


async def test_a_worker_that_does_not_listen_is_unavailable(engine: Any, tmp_path: Path) -> None:
    one = engine([ready()])
    one.paths[0].unlink()
    with pytest.raises(Unavailable, match="does not take loads"):
        await load(one, Room())


async def test_a_worker_that_ends_fails_its_loads_and_is_found_again(tmp_path: Path) -> None:
    """As after the death of an engine: nobody waits for ever, and the next load connects anew."""
    path = tmp_path / "w.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    client = load_channel.LoadClient(path)
    loading = asyncio.create_task(client.load(1, "a/b@v1-0", Path("/tier/x")))
    connection, _ = await asyncio.to_thread(listener.accept)
    await asyncio.to_thread(connection.recv, 100)
    connection.close()
    with pytest.raises(Unavailable, match="has ended"):
        await loading
    listener.close()
    LoadServer(path, lambda load: msgspec.structs.replace(ready(), number=load.number))
    assert (await client.load(2, "a/b@v1-0", Path("/tier/x"))).state == READY
    await client.close()


def test_sockets_of_ended_workers_are_cleared_away(tmp_path: Path) -> None:
    for name in ("w1.sock", "w999999999.sock", "web.sock"):
        (tmp_path / name).touch()
    assert socket_path(tmp_path, 77) == tmp_path / "w77.sock"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w1.sock", "web.sock"]
