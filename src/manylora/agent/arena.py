"""Shared memory of one size, and which of its ranges are free. Knows nothing of what lies there."""

from __future__ import annotations

import contextlib
import mmap
import os

from manylora.kernels.extents import Extents

PAGE_BYTES = 4096


class Arena:
    """An anonymous file in memory, mapped here and, through its descriptor, by others. Not thread-safe.

    Memory is taken from the system as it is written to, and kept: workers pin it for their devices, and would go on
    reading pages that the system had taken back.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
        self.descriptor = os.memfd_create("manylora-adapters", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.size_bytes)
        self._memory = mmap.mmap(self.descriptor, self.size_bytes)
        with contextlib.suppress(OSError):  # where the system gives large pages to shared memory, pinning is faster
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._extents = Extents(self.size_bytes // PAGE_BYTES)
        self.used_bytes = 0

    def take(self, nbytes: int) -> int | None:
        """The offset of a range of `nbytes`, now taken; None where no free range is that long."""
        pages = _pages(nbytes)
        start = self._extents.take(pages)
        if start is not None:
            self.used_bytes += pages * PAGE_BYTES
        return None if start is None else start * PAGE_BYTES

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free a range; whoever finds it later finds no block there."""
        pages = _pages(nbytes)
        self.view(offset, PAGE_BYTES)[:] = bytes(PAGE_BYTES)
        self._extents.give_back(offset // PAGE_BYTES, pages)
        self.used_bytes -= pages * PAGE_BYTES

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A range's bytes."""
        return memoryview(self._memory)[offset : offset + nbytes]


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES)
