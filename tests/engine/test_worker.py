"""A worker's loads over a fake manager: beside the steps, kept while there is no room, gone when nobody wants them."""

from __future__ import annotations

import asyncio
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from manylora.engine.load_channel import FAILED, FULL, MEASURE, READY, Load, LoadClient, Outcome  # noqa: E402
from manylora.errors import InvalidAdapter, Unavailable  # noqa: E402
from manylora.kernels.pool import PoolFull  # noqa: E402

FOLDER = "/tier/x"


class FakePrepared:
    """A packed form that notes its end."""

    packed = SimpleNamespace(nbytes=123)
    unknown = ("x",)
    source = "host"

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class FakeManager:
    """Places what is prepared, unless `refusal` is to be raised; waits for its gates."""

    def __init__(self) -> None:
        self.gate, self.placing = threading.Event(), threading.Event()
        self.gate.set()
        self.placing.set()
        self.unreadable: Exception | None = None
        self.refusal: Exception | None = None
        self.prepared: list[FakePrepared] = []
        self.placed: list[int] = []
        self.forgotten: list[int] = []
        self.store = SimpleNamespace(budget_bytes=1000, used_bytes=300)
        self.in_step_loads = 4

    def meet_agent(self) -> None:
        """Nobody to meet."""

    def prepare(self, folder: Path) -> FakePrepared:
        assert str(folder) == FOLDER
        self.gate.wait(10)
        if self.unreadable is not None:
            raise self.unreadable
        self.prepared.append(FakePrepared())
        return self.prepared[-1]

    def measure(self, folder: Path) -> Any:
        if self.unreadable is not None:
            raise self.unreadable
        return SimpleNamespace(nbytes=123, unknown=("x",), source="host")

    def place(self, lora_id: int, prepared: FakePrepared) -> None:
        self.placing.wait(10)
        if self.refusal is not None:
            raise self.refusal
        prepared.close()
        self.placed.append(lora_id)

    def forget(self, lora_id: int) -> int:
        self.forgotten.append(lora_id)
        return 7

    def active(self) -> list[int]:
        return self.placed


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager()


@pytest.fixture(scope="module")
def module() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from manylora.engine import worker
    return worker


@pytest.fixture
def loader(module: Any, manager: FakeManager) -> Any:
    return module.Loader(manager)


def load(number: int = 1, lora_id: int = 1) -> Load:
    return Load(number, lora_id, "a/b@v1-0", FOLDER)


def in_thread(loader: Any, results: list[Outcome]) -> threading.Thread:
    thread = threading.Thread(target=lambda: results.append(loader.load(load())))
    thread.start()
    return thread


def test_a_load_tells_its_size_its_source_and_what_is_unknown(loader: Any, manager: FakeManager) -> None:
    outcome = loader.load(load())
    assert (outcome.state, outcome.nbytes, outcome.source, outcome.unknown) == (READY, 123, "host", ("x",))
    assert outcome.seconds >= 0
    assert manager.placed == [1]
    assert manager.prepared[0].closed
    assert loader._loads == {}


def test_while_there_is_no_room_what_was_read_is_kept(loader: Any, manager: FakeManager) -> None:
    manager.refusal = PoolFull("full")
    assert loader.load(load()).state == FULL
    assert loader.load(load()).state == FULL
    assert not manager.prepared[0].closed
    manager.refusal = None
    assert loader.load(load()).state == READY
    assert len(manager.prepared) == 1
    assert manager.prepared[0].closed


def test_what_is_kept_goes_when_it_is_dropped(loader: Any, manager: FakeManager) -> None:
    manager.refusal = PoolFull("full")
    loader.load(load())
    assert loader.drop(1) == 7
    assert manager.prepared[0].closed
    assert manager.forgotten == [1]


def test_what_can_never_fit_is_a_failure_with_its_hint(loader: Any, manager: FakeManager) -> None:
    manager.refusal = Unavailable("the adapter needs 9 bytes, all adapter memory has 8", "raise --adapter-memory")
    outcome = loader.load(load())
    assert outcome.state == FAILED
    assert "raise --adapter-memory" in outcome.reason
    assert manager.prepared[0].closed
    assert loader._loads == {}


def test_a_read_that_fails_says_why_without_the_path(loader: Any, manager: FakeManager) -> None:
    manager.unreadable = InvalidAdapter(f"{FOLDER} has rank 128")
    outcome = loader.load(load())
    assert (outcome.state, outcome.reason) == (FAILED, "the adapter has rank 128")


@pytest.mark.parametrize("stage", ["gate", "placing"])
def test_what_is_dropped_on_its_way_leaves_again(loader: Any, manager: FakeManager, stage: str) -> None:
    """Whatever it had reached: it is out of memory once the load has ended, and is not let go of before."""
    results: list[Outcome] = []
    getattr(manager, stage).clear()
    thread = in_thread(loader, results)
    while not loader._loads or (stage == "placing" and not manager.prepared):
        pass
    loader.drop(1)
    assert not any(prepared.closed for prepared in manager.prepared)
    getattr(manager, stage).set()
    thread.join(10)
    assert manager.forgotten == [1, 1]
    assert manager.prepared[0].closed
    assert loader._loads == {}


def test_what_is_dropped_on_its_way_and_finds_no_room_lets_go(loader: Any, manager: FakeManager) -> None:
    results: list[Outcome] = []
    manager.refusal = PoolFull("full")
    manager.placing.clear()
    thread = in_thread(loader, results)
    while not manager.prepared:
        pass
    loader.drop(1)
    manager.placing.set()
    thread.join(10)
    assert manager.prepared[0].closed
    assert loader._loads == {}


def test_to_measure_takes_nothing_into_memory(loader: Any, manager: FakeManager) -> None:
    outcome = loader.load(load(lora_id=MEASURE))
    assert (outcome.state, outcome.nbytes, outcome.unknown) == (READY, 123, ("x",))
    assert manager.prepared == []
    assert manager.placed == []
    manager.unreadable = InvalidAdapter("no")
    assert loader.load(load(lora_id=MEASURE)).state == FAILED
    assert loader._loads == {}


@pytest.fixture
def worker(module: Any, manager: FakeManager) -> Any:
    class Worker(module.AdapterWorker):  # type: ignore[misc]
        def manylora_manager(self) -> Any:
            return manager

    return Worker()


async def test_loads_come_by_a_socket_in_parallel(worker: Any, manager: FakeManager, tmp_path: Path) -> None:
    path = worker.manylora_listen(str(tmp_path))
    assert worker.manylora_listen(str(tmp_path)) == path
    client = LoadClient(Path(path))
    outcomes = await asyncio.gather(*(client.load(number, "a/b@v1-0", Path(FOLDER)) for number in range(1, 9)))
    assert {outcome.state for outcome in outcomes} == {READY}
    assert sorted(manager.placed) == list(range(1, 9))
    assert worker.manylora_forget(3) == 7
    await client.close()


def test_residency(worker: Any, manager: FakeManager) -> None:
    manager.placed = [3, 5]
    assert worker.manylora_residency() == {
        "adapters": [3, 5],
        "budget_bytes": 1000,
        "used_bytes": 300,
        "in_step_loads": 4,
    }
