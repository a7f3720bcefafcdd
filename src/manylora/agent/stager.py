"""The host tier: packed adapters in shared memory, least recently used ones leaving first.

A block is leased to those who copy from it and never moves or goes while it is. Threads that ask for the same version
in the same form share one read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from manylora.adapter import check_digest
from manylora.agent.arena import Arena
from manylora.agent.packed_files import PackedFiles
from manylora.errors import NotFound, Unavailable
from manylora.staging.folder import read_folder
from manylora.staging.layout import EngineLayout
from manylora.staging.packed_form import PackedHeader, block_bytes, fill, header_of, pack_weights
from manylora.tiers.disk import DiskTier

log = logging.getLogger(__name__)

HOST, PACKED, FOLDER = "host", "packed", "folder"
"""Where a staged adapter came from."""
WAIT_S = 30.0
PARALLEL_PACKS = 2

Key = tuple[str, str]
"""Layout key and digest."""


@dataclass(slots=True, eq=False)
class Block:
    """A packed adapter in shared memory."""

    key: Key
    offset: int
    nbytes: int
    leases: int = 0
    gone: bool = False
    """Its version was dropped: it goes with its last lease."""


@dataclass(frozen=True, slots=True)
class Made:
    """What became of a version that was not in memory."""

    block: Block
    source: str


@dataclass(slots=True, eq=False)
class _Flight:
    """A version that one thread makes, for all who ask meanwhile."""

    made: Future[Made] = field(default_factory=Future)
    dropped: bool = False


Observer = Callable[[str, float], None]
"""Told the source and the seconds of everything that is staged."""


class Stager:
    """All packed adapters of a node. Thread-safe."""

    def __init__(self, disk: DiskTier, files: PackedFiles, arena: Arena, observe: Observer = lambda *_: None) -> None:
        self.arena = arena
        self.evictions = 0
        self._disk, self._files, self._observe = disk, files, observe
        self._blocks: OrderedDict[Key, Block] = OrderedDict()
        self._making: dict[Key, _Flight] = {}
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._packing = threading.Semaphore(PARALLEL_PACKS)
        self._writer = ThreadPoolExecutor(1, "write-packed")

    def stage(self, digest: str, layout: EngineLayout) -> tuple[Block, str]:
        """The block of a version, leased, and where it came from.

        Raises `NotFound`, `CorruptBlob`, `InvalidAdapter` or `Unavailable`: what is wrong with the version, or that
        memory is full of leased blocks.
        """
        started_s = time.monotonic()
        key = (layout.key, digest)
        with contextlib.suppress(OSError):  # the disk tier's order of use
            os.utime(self._disk.root / check_digest(digest))
        with self._lock:
            if (block := self._blocks.get(key)) is not None:
                self._lease(block)
                self._observe(HOST, time.monotonic() - started_s)
                return block, HOST
            flight = self._making.get(key)
            mine = flight is None
            if flight is None:
                flight = self._making[key] = _Flight()
        if mine:
            self._fly(key, layout, flight)
        made = flight.made.result()
        if not mine and not self._lease_if_there(made.block):
            return self.stage(digest, layout)
        self._observe(made.source, time.monotonic() - started_s)
        return made.block, made.source

    def release(self, block: Block) -> None:
        """Return a lease."""
        with self._lock:
            assert block.leases > 0
            block.leases -= 1
            if block.gone and not block.leases:
                self._free(block)
            self._freed.notify_all()

    def drop(self, digest: str) -> None:
        """Forget a version in every form, here and in packed files; leased blocks go with their last lease."""
        check_digest(digest)
        with self._lock:
            for block in [block for key, block in self._blocks.items() if key[1] == digest]:
                self._forget(block)
            for key, flight in self._making.items():
                flight.dropped |= key[1] == digest
            self._freed.notify_all()
        self._files.remove(digest)

    def blocks(self) -> list[Block]:
        """Everything in memory, least recently used first."""
        with self._lock:
            return list(self._blocks.values())

    def close(self) -> None:
        """Finish what is being written."""
        self._writer.shutdown()

    # ---- one version, made by one thread ----

    def _fly(self, key: Key, layout: EngineLayout, flight: _Flight) -> None:
        taken: list[Block] = []
        try:
            header, source = self._make(key, layout, taken)
        except BaseException as error:
            self._give_up(taken)
            with self._lock:
                del self._making[key]
            flight.made.set_exception(error)
            return
        (block,) = taken
        with self._lock:  # at once: whoever finds no flight finds the block
            del self._making[key]
            block.gone = flight.dropped
            if not block.gone:
                self._blocks[key] = block
            block.leases += source == FOLDER  # the writer's
        if source == FOLDER:
            self._keep(block, header)
        flight.made.set_result(Made(block, source))

    def _make(self, key: Key, layout: EngineLayout, taken: list[Block]) -> tuple[PackedHeader, str]:
        """Fill a block, the only one then in `taken`."""
        folder = self._disk.path(key[1])
        if folder is None:
            raise NotFound(f"version {key[1][:16]} is not on this node's disk")
        header = self._files.read(*key, lambda nbytes: self._room(key, nbytes, taken))
        if header is not None:
            return header, PACKED
        self._give_up(taken)
        return self._pack(key, layout, folder, taken), FOLDER

    def _pack(self, key: Key, layout: EngineLayout, folder: Path, taken: list[Block]) -> PackedHeader:
        with self._packing:
            read = read_folder(folder, layout)
            packed = pack_weights(layout, read.weights)
            header = header_of(packed, digest=key[1], layout=layout, read=read)
            fill(self._room(key, block_bytes(header), taken), header, packed)
            return header

    def _keep(self, block: Block, header: PackedHeader) -> None:
        try:
            self._writer.submit(self._write, block, header)
        except RuntimeError:  # the agent is closing
            self.release(block)

    def _write(self, block: Block, header: PackedHeader) -> None:
        try:
            self._files.write(self.arena.view(block.offset, block.nbytes), header)
            if block.gone:
                self._files.remove(header.digest)
        except Exception:  # the writer's only task is to spare the next start some work
            log.exception("the packed form of %s is not kept on disk", header.digest[:16])
        finally:
            self.release(block)

    # ---- memory ----

    def _room(self, key: Key, nbytes: int, taken: list[Block]) -> memoryview:
        """Memory for a block, leased to whoever fills it; others leave for it."""
        if nbytes > self.arena.size_bytes:
            raise Unavailable(
                f"the adapter needs {nbytes} bytes of host memory, all of it has {self.arena.size_bytes}",
                "raise --host-memory",
            )
        deadline_s = time.monotonic() + WAIT_S
        with self._lock:
            while (offset := self.arena.take(nbytes)) is None:
                if not self._evict_one() and not self._freed.wait(deadline_s - time.monotonic()):
                    raise Unavailable(
                        "all host memory for adapters is in use by loads", "retry, or raise --host-memory"
                    )
            taken.append(Block(key, offset, nbytes, leases=1))
        return self.arena.view(offset, nbytes)

    def _evict_one(self) -> bool:
        for block in self._blocks.values():
            if not block.leases:
                self._forget(block)
                self.evictions += 1
                return True
        return False

    def _lease_if_there(self, block: Block) -> bool:
        with self._lock:
            if not block.gone:
                self._lease(block)
            return not block.gone

    def _lease(self, block: Block) -> None:
        block.leases += 1
        self._blocks.move_to_end(block.key)

    def _forget(self, block: Block) -> None:
        del self._blocks[block.key]
        block.gone = True
        if not block.leases:
            self._free(block)

    def _give_up(self, taken: list[Block]) -> None:
        with self._lock:
            while taken:
                self._free(taken.pop())
            self._freed.notify_all()

    def _free(self, block: Block) -> None:
        self.arena.give_back(block.offset, block.nbytes)
