"""A node's disk with adapters on it, and what their packed forms must be."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft_folders import GATE_UP, LAYER, MODULES, OUT, config, factors, layout, publish

from manylora.agent.arena import PAGE_BYTES, Arena
from manylora.agent.packed_files import PackedFiles
from manylora.agent.stager import Block, Stager
from manylora.staging.folder import read_folder
from manylora.staging.layout import PAGES, EngineLayout
from manylora.staging.packed_form import block_bytes, fill, header_of, pack_weights, payload_start, read_header
from manylora.tiers.disk import DiskTier

EXACT_LAYOUT = layout()
PAGED_LAYOUT = layout(form=PAGES, dtype="bfloat16", modules=(MODULES[OUT], MODULES[GATE_UP]))
LAYOUTS = (EXACT_LAYOUT, PAGED_LAYOUT)


class Node:
    """Adapters' folders under `root`, packed files in `root/.packed`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.disk, self.files = DiskTier(root), PackedFiles(root / ".packed")

    def publish(self, lora_rank: int = 8, *, wide: bool = False) -> str:
        """A new adapter, of some 8 KiB, or of some 20 KiB for each rank."""
        tensors = factors(f"{LAYER}.self_attn.o_proj", lora_rank, 24, 20)
        if wide:
            tensors |= factors(f"{LAYER}.mlp.up_proj", lora_rank, 20, 5000)
        return publish(self.root, tensors, config(lora_rank))

    def stager(self, size_bytes: int = 1 << 20, files: PackedFiles | None = None) -> Stager:
        return Stager(self.disk, files or self.files, Arena(size_bytes))

    def expected(self, digest: str, engine: EngineLayout = EXACT_LAYOUT) -> bytes:
        """A version's payload."""
        read = read_folder(self.root / digest, engine)
        packed = pack_weights(engine, read.weights)
        header = header_of(packed, digest=digest, layout=engine, read=read)
        block = bytearray(block_bytes(header))
        fill(block, header, packed)
        return bytes(block[payload_start(header) :])

    def nbytes(self, digest: str, engine: EngineLayout = EXACT_LAYOUT) -> int:
        """What a version takes of an arena."""
        read = read_folder(self.root / digest, engine)
        header = header_of(pack_weights(engine, read.weights), digest=digest, layout=engine, read=read)
        return -(-block_bytes(header) // PAGE_BYTES) * PAGE_BYTES

    def packed_file(self, digest: str, engine: EngineLayout = EXACT_LAYOUT) -> Path:
        return self.files.root / engine.key / digest


def payload(memory: Any, digest: str, engine: EngineLayout = EXACT_LAYOUT) -> bytes:
    """The payload of a block that must be this version's."""
    header = read_header(memory)
    assert (header.digest, header.layout) == (digest, engine.key)
    start = payload_start(header)
    return bytes(memoryview(memory)[start : start + header.payload_bytes])


def content(stager: Stager, block: Block) -> bytes:
    """All bytes of a block in memory."""
    return bytes(stager.arena.view(block.offset, block.nbytes))


def settle(stager: Stager) -> None:
    """Wait until everything that was to be written is."""
    stager._writer.submit(int).result(30)


def check_invariants(stager: Stager, held: list[Block] | None = None) -> None:
    """No two live blocks overlap, and the arena's account is theirs. `held`: leased ones, which may be gone."""
    settle(stager)
    blocks = {id(block): block for block in [*stager.blocks(), *(held or [])]}
    ranges = sorted((block.offset, block.offset + _rounded(block.nbytes)) for block in blocks.values())
    for (_, end), (start, _) in itertools.pairwise(ranges):
        assert end <= start
    assert all(0 <= start < end <= stager.arena.size_bytes for start, end in ranges)
    assert stager.arena.used_bytes == sum(end - start for start, end in ranges)
    assert [block.key for block in stager.blocks()] == list(stager._blocks)
    assert not any(block.gone for block in stager.blocks())
    assert not stager._making


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def eventually(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until `holds`."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.005)
