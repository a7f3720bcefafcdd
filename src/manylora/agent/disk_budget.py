"""Keeps what adapters take of a node's disk within a budget: what was used longest ago goes first."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from manylora.agent.packed_files import PackedFiles
from manylora.tiers.disk import DiskTier

log = logging.getLogger(__name__)

INTERVAL_S = 15.0


@dataclass(frozen=True, slots=True)
class _Entry:
    used_s: float
    nbytes: int
    remove: Callable[[], object]


class DiskBudget:
    """Adapter folders and packed files of a node, looked through now and then."""

    def __init__(self, disk: DiskTier, files: PackedFiles, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = self.evictions = 0
        self._disk, self._files = disk, files
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin to look; returns at once."""
        threading.Thread(target=self._run, name="disk-budget", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.enforce()
            except OSError:
                log.exception("the disk tier cannot be looked through")
            self._stop.wait(INTERVAL_S)

    def enforce(self) -> None:
        """Delete what was used longest ago until the rest fits. What is in memory stays there."""
        folders = [folder for digest in self._disk.digests() if (folder := self._disk.path(digest)) is not None]
        found = [_Entry(file.used_s, file.nbytes, file.remove) for file in self._files.entries()]
        found += [_Entry(*_use_and_size(folder), partial(self._disk.remove, folder.name)) for folder in folders]
        self.used_bytes = sum(entry.nbytes for entry in found)
        for entry in sorted(found, key=lambda entry: entry.used_s):
            if self.used_bytes <= self.budget_bytes:
                return
            try:
                entry.remove()
            except OSError as error:  # the rest has to fit all the same
                log.warning("an adapter cannot be deleted: %s", error)
                continue
            self.used_bytes -= entry.nbytes
            self.evictions += 1


def _use_and_size(folder: Path) -> tuple[float, int]:
    total, used_s = 0, 0.0
    with contextlib.suppress(FileNotFoundError):
        used_s = folder.stat().st_mtime
        total = sum(file.stat().st_size for file in folder.iterdir())
    return used_s, total
