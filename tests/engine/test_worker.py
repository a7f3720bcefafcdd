"""A worker's calls over a fake manager: read beside the steps, taken in between them, kept while there is no room."""

from __future__ import annotations

import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from manylora.engine.worker_calls import FAILED, FULL, PENDING, READY  # noqa: E402
from manylora.errors import InvalidAdapter, Unavailable  # noqa: E402
from manylora.kernels.pool import PoolFull  # noqa: E402


class FakeManager:
    """Registers what is prepared, unless `refusal` is to be raised."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.unreadable: Exception | None = None
        self.refusal: Exception | None = None
        self.prepared: list[int] = []
        self.registered: list[int] = []
        self.forgotten: list[int] = []
        self.store = SimpleNamespace(budget_bytes=1000, used_bytes=300)
        self.in_step_loads = 4

    def prepare(self, request: Any) -> Any:
        self.gate.wait(10)
        if self.unreadable is not None:
            raise self.unreadable
        self.prepared.append(request.lora_int_id)
        packed = SimpleNamespace(nbytes=123)
        return SimpleNamespace(lora=SimpleNamespace(id=request.lora_int_id), packed=packed, unknown=("x",))

    def register(self, prepared: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.registered.append(prepared.lora.id)

    def forget(self, lora_id: int) -> int:
        self.forgotten.append(lora_id)
        return 7

    def active(self) -> list[int]:
        return self.registered


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager()


@pytest.fixture
def worker(manager: FakeManager) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from manylora.engine.worker import AdapterWorker

    class Worker(AdapterWorker):
        def manylora_manager(self) -> Any:
            return manager

    return Worker()


def settled(worker: Any, lora_id: int) -> dict[str, Any]:
    """The first answer about a read that has ended."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        answer: dict[str, Any] = worker.manylora_register(lora_id)
        if answer["state"] != PENDING:
            return answer
        time.sleep(0.001)
    raise AssertionError("the read never ended")


def test_a_read_is_pending_until_it_ends_and_is_told_once(worker: Any, manager: FakeManager) -> None:
    manager.gate.clear()
    worker.manylora_prepare(1, "a/b@v1-0", "/tier/x")
    assert worker.manylora_register(1) == {"state": PENDING}
    manager.gate.set()
    answer = settled(worker, 1)
    assert answer.pop("seconds") >= 0
    assert answer == {"state": READY, "bytes": 123, "unknown": ["x"]}
    assert manager.registered == [1]
    assert worker.manylora_register(1) == {"state": PENDING}


def test_while_there_is_no_room_what_was_read_is_kept(worker: Any, manager: FakeManager) -> None:
    manager.refusal = PoolFull("full")
    worker.manylora_prepare(1, "a/b@v1-0", "/tier/x")
    assert settled(worker, 1) == {"state": FULL}
    assert worker.manylora_register(1) == {"state": FULL}
    manager.refusal = None
    assert worker.manylora_register(1)["state"] == READY
    assert manager.prepared == [1]


def test_what_can_never_fit_is_a_failure_with_its_hint(worker: Any, manager: FakeManager) -> None:
    manager.refusal = Unavailable("the adapter needs 9 bytes, all adapter memory has 8", "raise --adapter-memory")
    worker.manylora_prepare(1, "a/b@v1-0", "/tier/x")
    answer = settled(worker, 1)
    assert answer["state"] == FAILED
    assert "raise --adapter-memory" in answer["reason"]
    assert worker.manylora_register(1) == {"state": PENDING}


def test_a_read_that_fails_says_why_without_the_path(worker: Any, manager: FakeManager) -> None:
    manager.unreadable = InvalidAdapter("/tier/x has rank 128")
    worker.manylora_prepare(1, "a/b@v1-0", "/tier/x")
    assert settled(worker, 1) == {"state": FAILED, "reason": "the adapter has rank 128"}


def test_what_is_forgotten_while_it_is_read_is_never_taken_in(worker: Any, manager: FakeManager) -> None:
    manager.gate.clear()
    worker.manylora_prepare(1, "a/b@v1-0", "/tier/x")
    assert worker.manylora_forget(1) == 7
    manager.gate.set()
    worker.manylora_loader.thread.submit(lambda: None).result(10)
    assert worker.manylora_register(1) == {"state": PENDING}
    assert manager.registered == []


def test_residency(worker: Any, manager: FakeManager) -> None:
    manager.registered = [3, 5]
    assert worker.manylora_residency() == {
        "adapters": [3, 5],
        "budget_bytes": 1000,
        "used_bytes": 300,
        "in_step_loads": 4,
    }
