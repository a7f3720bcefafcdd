"""The disk's budget: what was used longest ago goes, no more than must, and nothing keeps the rest from going."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from agent_node import eventually

from manylora.agent import disk_budget
from manylora.agent.disk_budget import DiskBudget
from manylora.agent.packed_files import PackedFiles
from manylora.tiers.disk import DiskTier


def digest(number: int) -> str:
    return f"{number:064x}"


class Disk:
    """Folders and packed files of 1000 bytes, last used at the second that is told."""

    def __init__(self, root: Path) -> None:
        self.tier, self.files = DiskTier(root), PackedFiles(root / ".packed")

    def folder(self, number: int, used_s: float) -> Path:
        folder = self.tier.root / digest(number)
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_bytes(bytes(100))
        (folder / "adapter_model.safetensors").write_bytes(bytes(900))
        os.utime(folder, (used_s, used_s))
        return folder

    def packed(self, number: int, used_s: float, layout: str = "layout") -> Path:
        path = self.files.root / layout / digest(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (used_s, used_s))
        return path

    def budget(self, nbytes: int) -> DiskBudget:
        return DiskBudget(self.tier, self.files, nbytes)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "disk")


def left(*paths: Path) -> list[bool]:
    return [path.exists() for path in paths]


def test_what_fits_stays(disk: Disk) -> None:
    paths = disk.folder(1, 10), disk.packed(1, 5)
    budget = disk.budget(2000)
    budget.enforce()
    assert left(*paths) == [True, True]
    assert (budget.used_bytes, budget.evictions) == (2000, 0)


def test_what_was_used_longest_ago_goes_and_no_more(disk: Disk) -> None:
    paths = disk.folder(1, 40), disk.packed(1, 10), disk.folder(2, 20), disk.packed(2, 30)
    budget = disk.budget(2500)
    budget.enforce()
    assert left(*paths) == [True, False, False, True]
    assert (budget.used_bytes, budget.evictions) == (2000, 2)
    budget.enforce()
    assert (budget.used_bytes, budget.evictions) == (2000, 2)


def test_a_packed_file_of_an_old_engine_goes_alone(disk: Disk) -> None:
    old, new = disk.packed(1, 10, "old"), disk.packed(1, 90, "new")
    others = disk.folder(2, 20), disk.folder(3, 30)
    budget = disk.budget(3000)
    budget.enforce()
    assert left(old, new, *others) == [False, True, True, True]
    assert (budget.used_bytes, budget.evictions) == (3000, 1)


def test_a_budget_of_nothing_empties_the_disk(disk: Disk) -> None:
    for number in range(5):
        disk.folder(number, number)
        disk.packed(number, number)
    budget = disk.budget(0)
    budget.enforce()
    assert (disk.tier.digests(), disk.files.entries()) == ([], [])
    assert (budget.used_bytes, budget.evictions) == (0, 10)


def test_an_empty_or_absent_disk(disk: Disk) -> None:
    budget = disk.budget(0)
    budget.enforce()
    assert (budget.used_bytes, budget.evictions) == (0, 0)


def test_what_cannot_be_deleted_does_not_keep_the_rest(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, goes, stays = disk.folder(1, 10), disk.folder(2, 20), disk.folder(3, 30)
    original = DiskTier.remove

    def remove(self: DiskTier, name: str) -> bool:
        if name == digest(1):
            raise PermissionError(13, "Permission denied")
        return original(self, name)

    monkeypatch.setattr(DiskTier, "remove", remove)
    budget = disk.budget(2000)
    budget.enforce()
    assert left(stuck, goes, stays) == [True, False, True]
    assert (budget.used_bytes, budget.evictions) == (2000, 1)


def test_what_is_being_filled_or_written_is_left_alone(disk: Disk) -> None:
    filled = disk.tier.root / ".partial-0"
    filled.mkdir(parents=True)
    (filled / "adapter_model.safetensors").write_bytes(bytes(1000))
    written = disk.packed(1, 1).rename(disk.files.root / "layout" / ".partial-1")
    disk.budget(0).enforce()
    assert left(filled, written) == [True, True]


def test_a_folder_that_goes_meanwhile_counts_nothing(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = disk.folder(1, 10)
    monkeypatch.setattr(DiskTier, "path", lambda self, name: self.root / name)
    monkeypatch.setattr(DiskTier, "digests", lambda self: [digest(1), digest(2)])
    budget = disk.budget(1000)
    budget.enforce()
    assert folder.exists()
    assert budget.used_bytes == 1000


def test_it_looks_now_and_then_until_it_is_stopped(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_budget, "INTERVAL_S", 0.01)
    budget = disk.budget(500)
    failures = [OSError(5, "Input/output error")]
    original = DiskTier.digests

    def digests(self: DiskTier) -> list[str]:
        if failures:
            raise failures.pop()
        return original(self)

    monkeypatch.setattr(DiskTier, "digests", digests)
    budget.start()
    first = disk.folder(1, 10)
    eventually(lambda: not first.exists())
    second = disk.folder(2, 10)
    eventually(lambda: not second.exists())
    budget.stop()
    time.sleep(0.1)
    third = disk.folder(3, 10)
    time.sleep(0.1)
    assert third.exists()
