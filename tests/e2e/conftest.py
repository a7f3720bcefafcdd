"""Fixtures of the end-to-end tests: the zoo and the one running stack. Nearly everything here needs the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.stack import Stack, StackHolder
from harness.zoo import Zoo, open_zoo

HERE = Path(__file__).parent
LAST = (
    "test_bad_adapter.py",
    "test_overflow.py",
    "test_tiers.py",
    "test_tensor_parallel.py",
    "test_crashes.py",
    "test_shutdown.py",
)
"""Files that damage, kill and stop run after those that need the stack's processes to stay the same."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        if item.path.name != "test_zoo.py":
            item.add_marker(pytest.mark.engine)
        # A test may be the one that builds the zoo and starts the engine.
        item.add_marker(pytest.mark.timeout(900))
    ours.sort(key=lambda item: LAST.index(item.path.name) if item.path.name in LAST else -1)
    places = iter(ours)
    items[:] = [next(places) if HERE in item.path.parents else item for item in items]


@pytest.fixture(scope="session")
def zoo(pytestconfig: pytest.Config) -> Zoo:
    """The base model, its adapters and PEFT's answers; built on first use (about a minute)."""
    return open_zoo(pytestconfig.cache.mkdir("model-zoo"))


@pytest.fixture(scope="session")
def holder(zoo: Zoo) -> Iterator[StackHolder]:
    """Owns the session's stack; tests that stop it take this, all others take `stack`."""
    holder = StackHolder(zoo)
    yield holder
    holder.end()


@pytest.fixture
def stack(holder: StackHolder) -> Stack:
    """`manylora serve`, ready."""
    return holder.running()


@pytest.fixture
def record_figures(capsys: pytest.CaptureFixture[str]) -> Callable[[str, object], None]:
    """Print a measurement, and add it to the JSON file that MANYLORA_TEST_FIGURES names."""

    def record(name: str, figures: object) -> None:
        with capsys.disabled():
            print(f"\n{name}: {json.dumps(figures)}")
        if target := os.environ.get("MANYLORA_TEST_FIGURES"):
            file = Path(target)
            known = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps({**known, name: figures}, indent=2) + "\n")

    return record
