"""A push that is killed at any point leaves nothing visible, and the same push then succeeds."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from manylora.adapter import AdapterName
from manylora.registry.catalog import Catalog
from manylora.settings import Settings

PUSH = Path(__file__).with_name("push_process.py")
Make = Callable[..., Path]


def command(settings: Settings, folder: Path, *step: str) -> list[str]:
    return [sys.executable, "-W", "error", str(PUSH), str(settings.home), settings.database_url, str(folder), *step]


@pytest.mark.parametrize(
    "step",
    [
        "put before",
        "put after",
        "chunk after",
        "visible before",
        "version after",
        "alias after",
        "audit after",
        "visible after",
        "commit before",
    ],
)
def test_killed_before_the_commit(
    catalog: Catalog, settings: Settings, make: Make, support: AdapterName, step: str
) -> None:
    catalog.publish(make(fill=1), support, base_model="tiny-base", actor="me")
    before = (catalog.change_seq(), catalog.adapters(), catalog.versions(support), catalog.audit())
    folder = make(fill=2)
    killed = subprocess.run(command(settings, folder, *step.split()), capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (catalog.change_seq(), catalog.adapters(), catalog.versions(support), catalog.audit()) == before
    assert all(result.ok for result in catalog.verify())
    again = subprocess.run(command(settings, folder), capture_output=True, text=True, timeout=60)
    assert (again.stdout, again.stderr) == ("2 True\n", "")
    assert catalog.adapter(support).live == 2
    assert [result.ok for result in catalog.verify()] == [True, True]


def test_killed_right_after_the_commit(catalog: Catalog, settings: Settings, make: Make, support: AdapterName) -> None:
    folder = make(fill=1)
    killed = subprocess.run(command(settings, folder, "commit", "after"), capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert catalog.adapter(support).live == 1
    again = subprocess.run(command(settings, folder), capture_output=True, text=True, timeout=60)
    assert again.stdout == "1 False\n"
    assert [result.ok for result in catalog.verify()] == [True]


def test_killed_at_random_moments(catalog: Catalog, settings: Settings, make: Make, support: AdapterName) -> None:
    for round_number in range(6):
        process = subprocess.Popen(command(settings, make(fill=round_number)), stdout=subprocess.PIPE)
        try:
            process.wait(timeout=0.5 + 0.15 * round_number)
        except subprocess.TimeoutExpired:
            process.kill()
        assert process.stdout is not None
        acknowledged = process.stdout.read()
        process.stdout.close()
        process.wait()
        if acknowledged:
            assert catalog.adapters()
        assert all(result.ok for result in catalog.verify())
    published = catalog.publish(make(fill=99), support, base_model="tiny-base", actor="me", promote=True)
    assert catalog.adapter(support).live == published.version.ref.number


def test_pushes_from_several_processes_get_distinct_numbers(
    catalog: Catalog, settings: Settings, make: Make, support: AdapterName
) -> None:
    folders = [make(fill=fill) for fill in range(5)] + [make(fill=0)]
    processes = [
        subprocess.Popen(command(settings, folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for folder in folders
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [errors for _, errors in outputs] == [""] * 6
    assert Counter(out.split()[1] for out, _ in outputs) == {"True": 5, "False": 1}
    assert sorted({int(out.split()[0]) for out, _ in outputs}) == [1, 2, 3, 4, 5]
    assert [version.ref.number for version in catalog.versions(support)] == [1, 2, 3, 4, 5]
    assert len({version.digest for version in catalog.versions(support)}) == 5
    assert all(result.ok for result in catalog.verify())
