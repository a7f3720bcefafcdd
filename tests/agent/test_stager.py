"""The host tier: a lease holds a block where it is, and what is staged is the version that was asked for."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from agent_node import (  # noqa: E402
    EXACT_LAYOUT,
    LAYOUTS,
    Node,
    check_invariants,
    content,
    payload,
    settle,
)
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from peft_folders import LAYER, factors, publish  # noqa: E402

from manylora.adapter import DIGEST_HEX_CHARS  # noqa: E402
from manylora.agent import stager as stager_module  # noqa: E402
from manylora.agent.packed_files import PackedFiles  # noqa: E402
from manylora.agent.stager import FOLDER, HOST, PACKED, Block  # noqa: E402
from manylora.errors import CorruptBlob, InvalidAdapter, InvalidName, NotFound, Unavailable  # noqa: E402
from manylora.staging.folder import read_folder  # noqa: E402
from manylora.staging.packed_form import PackedHeader  # noqa: E402


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "disk")


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stager_module, "WAIT_S", 0.05)


class NoFiles(PackedFiles):
    """Keeps nothing on disk."""

    def write(self, block: memoryview, header: PackedHeader) -> None:
        pass


class SlowFiles(PackedFiles):
    """Writes once it may."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.began, self.go_on = threading.Event(), threading.Event()

    def write(self, block: memoryview, header: PackedHeader) -> None:
        self.began.set()
        assert self.go_on.wait(30)
        super().write(block, header)


def hold_reads(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event, list[str]]:
    """Folders are read once the second event is set; the first says that one waits; and which were read."""
    waits, go_on, read = threading.Event(), threading.Event(), list[str]()

    def held(folder: Path, *args: Any) -> Any:
        read.append(folder.name)
        waits.set()
        assert go_on.wait(30)
        return read_folder(folder, *args)

    monkeypatch.setattr(stager_module, "read_folder", held)
    return waits, go_on, read


# ---- where a version comes from ----


@pytest.mark.parametrize("engine", LAYOUTS, ids=["exact", "paged"])
def test_a_version_is_packed_once_and_then_read(node: Node, engine: Any) -> None:
    digest = node.publish(wide=True)
    stager = node.stager()
    expected = node.expected(digest, engine)
    block, source = stager.stage(digest, engine)
    assert (source, payload(content(stager, block), digest, engine)) == (FOLDER, expected)
    again, source = stager.stage(digest, engine)
    assert (source, again) == (HOST, block)
    settle(stager)
    assert block.leases == 2
    other = node.stager()
    block, source = other.stage(digest, engine)
    assert (source, payload(content(other, block), digest, engine)) == (PACKED, expected)
    settle(other)
    assert block.leases == 1
    check_invariants(stager)
    check_invariants(other)


def test_two_layouts_are_two_blocks(node: Node) -> None:
    digest = node.publish(wide=True)
    stager = node.stager()
    blocks = [stager.stage(digest, engine)[0] for engine in LAYOUTS]
    assert blocks[0].offset != blocks[1].offset
    for block, engine in zip(blocks, LAYOUTS, strict=True):
        assert payload(content(stager, block), digest, engine) == node.expected(digest, engine)
    check_invariants(stager)


def test_whatever_is_staged_is_told(node: Node) -> None:
    told: list[str] = []
    stager = node.stager()
    stager._observe = lambda source, seconds: told.append(source) if seconds >= 0 else None
    digest = node.publish()
    for _ in range(2):
        stager.stage(digest, EXACT_LAYOUT)
    with pytest.raises(NotFound):
        stager.stage("0" * DIGEST_HEX_CHARS, EXACT_LAYOUT)
    assert told == [FOLDER, HOST]


def test_staging_marks_the_folder_as_used(node: Node) -> None:
    digest = node.publish()
    os.utime(node.root / digest, (1.0, 1.0))
    stager = node.stager()
    for _ in range(2):
        stager.stage(digest, EXACT_LAYOUT)
        assert (node.root / digest).stat().st_mtime > 1e9
        os.utime(node.root / digest, (1.0, 1.0))


# ---- what fails ----


def test_what_is_not_on_this_disk_is_not_found_whatever_is_packed(node: Node) -> None:
    digest = node.publish()
    stager = node.stager()
    stager.release(stager.stage(digest, EXACT_LAYOUT)[0])
    settle(stager)
    assert node.packed_file(digest).exists()
    shutil.rmtree(node.root / digest)
    with pytest.raises(NotFound):
        node.stager().stage(digest, EXACT_LAYOUT)


@pytest.mark.parametrize("digest", ["", "..", "*", "A" * 64, "../" + "a" * 61, "a" * 65])
def test_names_never_reach_a_path(node: Node, digest: str) -> None:
    stager = node.stager()
    for call in (lambda: stager.stage(digest, EXACT_LAYOUT), lambda: stager.drop(digest)):
        with pytest.raises(InvalidName):
            call()


def test_a_refused_adapter_leaves_nothing_and_is_tried_anew(node: Node) -> None:
    digest = publish(node.root, factors(f"{LAYER}.self_attn.o_proj", 8, 23, 20))
    stager = node.stager()
    for _ in range(2):
        with pytest.raises(InvalidAdapter):
            stager.stage(digest, EXACT_LAYOUT)
        check_invariants(stager)
    assert stager.arena.used_bytes == 0


def test_changed_bytes_are_never_staged(node: Node) -> None:
    digest, other = node.publish(), node.publish()
    shutil.copy(node.root / other / "adapter_model.safetensors", node.root / digest)
    stager = node.stager()
    with pytest.raises(CorruptBlob):
        stager.stage(digest, EXACT_LAYOUT)
    check_invariants(stager)


def test_a_folder_that_goes_while_it_is_read_is_not_found(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = node.publish()
    waits, go_on, _ = hold_reads(monkeypatch)
    stager = node.stager()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(stager.stage, digest, EXACT_LAYOUT)
        assert waits.wait(30)
        node.disk.remove(digest)
        go_on.set()
        with pytest.raises(NotFound):
            asked.result(30)
    check_invariants(stager)


def test_a_fill_that_fails_gives_its_memory_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = node.publish()
    stager = node.stager()

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(stager_module, "fill", fail)
        with pytest.raises(MemoryError):
            stager.stage(digest, EXACT_LAYOUT)
    check_invariants(stager)
    assert stager.arena.used_bytes == 0
    stager.stage(digest, EXACT_LAYOUT)


def test_a_packed_file_that_is_of_no_use_is_made_anew(node: Node) -> None:
    digest = node.publish()
    first = node.stager()
    first.stage(digest, EXACT_LAYOUT)
    settle(first)
    path = node.packed_file(digest)
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    stager = node.stager()
    block, source = stager.stage(digest, EXACT_LAYOUT)
    assert (source, payload(content(stager, block), digest)) == (FOLDER, node.expected(digest))
    check_invariants(stager)
    assert path.read_bytes() == sound


# ---- threads that ask for the same ----


def test_threads_share_one_read_and_have_a_lease_each(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = node.publish()
    _, go_on, read = hold_reads(monkeypatch)
    stager = node.stager()
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(stager.stage, digest, EXACT_LAYOUT) for _ in range(8)]
        time.sleep(0.1)
        go_on.set()
        blocks = [each.result(30)[0] for each in asked]
    assert len(read) == 1
    assert all(block is blocks[0] for block in blocks)
    settle(stager)
    assert blocks[0].leases == 8
    for block in blocks:
        stager.release(block)
    check_invariants(stager)


def test_threads_share_the_error_too(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = publish(node.root, factors(f"{LAYER}.self_attn.o_proj", 8, 23, 20))
    _, go_on, read = hold_reads(monkeypatch)
    stager = node.stager()
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(stager.stage, digest, EXACT_LAYOUT) for _ in range(4)]
        time.sleep(0.1)
        go_on.set()
        assert all(isinstance(each.exception(30), InvalidAdapter) for each in asked)
    assert len(read) == 1
    check_invariants(stager)


def test_one_that_waits_for_memory_keeps_no_other_from_what_is_there(node: Node, short_wait: None) -> None:
    there, large = node.publish(), node.publish(8, wide=True)
    stager = node.stager(node.nbytes(large))
    block, _ = stager.stage(there, EXACT_LAYOUT)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(stager.stage, large, EXACT_LAYOUT)
        assert stager.stage(there, EXACT_LAYOUT) == (block, HOST)
        assert isinstance(waiting.exception(30), Unavailable)
    check_invariants(stager)


# ---- memory ----


def test_what_was_used_longest_ago_leaves_first(node: Node) -> None:
    digests = [node.publish() for _ in range(4)]
    stager = node.stager(3 * node.nbytes(digests[0]), NoFiles(node.files.root))
    for digest in (*digests[:3], digests[0]):
        stager.release(stager.stage(digest, EXACT_LAYOUT)[0])
        settle(stager)
    stager.release(stager.stage(digests[3], EXACT_LAYOUT)[0])
    assert [block.key[1] for block in stager.blocks()] == [digests[2], digests[0], digests[3]]
    assert stager.evictions == 1
    check_invariants(stager)


def test_a_leased_block_neither_goes_nor_changes(node: Node) -> None:
    digests = [node.publish() for _ in range(12)]
    stager = node.stager(3 * node.nbytes(digests[0]))
    kept, _ = stager.stage(digests[0], EXACT_LAYOUT)
    before = content(stager, kept)
    for digest in digests[1:]:
        block, _ = stager.stage(digest, EXACT_LAYOUT)
        assert payload(content(stager, block), digest) == node.expected(digest)
        stager.release(block)
        settle(stager)
    assert content(stager, kept) == before
    assert stager.stage(digests[0], EXACT_LAYOUT) == (kept, HOST)
    check_invariants(stager)


def test_memory_full_of_leases_waits_and_then_gives_up(node: Node, short_wait: None) -> None:
    first, second = node.publish(), node.publish()
    stager = node.stager(node.nbytes(first))
    block, _ = stager.stage(first, EXACT_LAYOUT)
    before = content(stager, block)
    for _ in range(2):
        with pytest.raises(Unavailable, match="in use by loads") as caught:
            stager.stage(second, EXACT_LAYOUT)
        assert "--host-memory" in caught.value.hint
    assert content(stager, block) == before
    stager.release(block)
    assert stager.stage(second, EXACT_LAYOUT)[1] == FOLDER
    check_invariants(stager)


def test_whoever_waits_goes_on_with_the_next_release(node: Node) -> None:
    first, second = node.publish(), node.publish()
    stager = node.stager(node.nbytes(first))
    block, _ = stager.stage(first, EXACT_LAYOUT)
    settle(stager)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(stager.stage, second, EXACT_LAYOUT)
        time.sleep(0.1)
        assert not waiting.done()
        stager.release(block)
        staged, source = waiting.result(10)
    assert (source, payload(content(stager, staged), second)) == (FOLDER, node.expected(second))
    check_invariants(stager)


def test_an_adapter_larger_than_all_memory_is_refused_at_once(node: Node) -> None:
    small, large = node.publish(), node.publish(8, wide=True)
    stager = node.stager(node.nbytes(large) - 4096)
    stager.release(stager.stage(small, EXACT_LAYOUT)[0])
    with pytest.raises(Unavailable, match=r"needs \d+ bytes of host memory, all of it has \d+") as caught:
        stager.stage(large, EXACT_LAYOUT)
    assert "--host-memory" in caught.value.hint
    assert len(stager.blocks()) == 1, "others had to leave for what can never fit"
    check_invariants(stager)


def test_room_in_pieces_is_no_room_until_the_middle_goes(node: Node, short_wait: None) -> None:
    small = [node.publish() for _ in range(3)]
    stager = node.stager(3 * node.nbytes(small[0]))
    blocks = [stager.stage(digest, EXACT_LAYOUT)[0] for digest in small]
    settle(stager)
    stager.release(blocks[0])
    stager.release(blocks[2])
    two = node.nbytes(small[0]) * 2
    with pytest.raises(Unavailable):
        stager._room(("x", "y"), two, [])
    assert blocks[1].leases == 1
    stager.release(blocks[1])
    taken: list[Block] = []
    stager._room(("x", "y"), two, taken)
    assert len(taken) == 1


# ---- versions that are dropped ----


def test_a_dropped_version_is_gone_in_every_form(node: Node) -> None:
    digest, other = node.publish(wide=True), node.publish()
    stager = node.stager()
    for engine in LAYOUTS:
        stager.release(stager.stage(digest, engine)[0])
    stager.release(stager.stage(other, EXACT_LAYOUT)[0])
    settle(stager)
    stager.drop(digest)
    assert [block.key[1] for block in stager.blocks()] == [other]
    assert not any(node.packed_file(digest, engine).exists() for engine in LAYOUTS)
    assert node.packed_file(other).exists()
    check_invariants(stager)


def test_a_dropped_version_stays_for_those_who_copy_from_it(node: Node) -> None:
    digest, other = node.publish(), node.publish()
    stager = node.stager(2 * node.nbytes(digest))
    leased = [stager.stage(digest, EXACT_LAYOUT)[0] for _ in range(2)]
    settle(stager)
    before = content(stager, leased[0])
    stager.drop(digest)
    assert stager.blocks() == []
    check_invariants(stager, held=leased[:1])
    anew, source = stager.stage(digest, EXACT_LAYOUT)
    assert source == FOLDER
    assert anew.offset != leased[0].offset
    stager.release(anew)
    stager.stage(other, EXACT_LAYOUT)
    assert content(stager, leased[0]) == before
    stager.release(leased[0])
    assert content(stager, leased[0]) == before
    stager.release(leased[1])
    assert content(stager, leased[0])[:4096] == bytes(4096), "whoever still looks finds a block"
    check_invariants(stager)


def test_a_version_dropped_while_it_is_made_is_not_kept(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = node.publish()
    waits, go_on, _ = hold_reads(monkeypatch)
    stager = node.stager()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(stager.stage, digest, EXACT_LAYOUT)
        assert waits.wait(30)
        stager.drop(digest)
        go_on.set()
        block, _ = asked.result(30)
    settle(stager)
    assert payload(content(stager, block), digest) == node.expected(digest)
    assert stager.blocks() == []
    assert node.files.entries() == []
    check_invariants(stager, held=[block])
    stager.release(block)
    check_invariants(stager)
    assert stager.arena.used_bytes == 0


def test_a_version_dropped_while_it_is_written_leaves_no_file(node: Node) -> None:
    digest = node.publish()
    files = SlowFiles(node.files.root)
    stager = node.stager(files=files)
    stager.release(stager.stage(digest, EXACT_LAYOUT)[0])
    assert files.began.wait(30)
    stager.drop(digest)
    files.go_on.set()
    settle(stager)
    assert node.files.entries() == []
    check_invariants(stager)
    assert stager.arena.used_bytes == 0


def test_those_who_waited_for_a_version_that_was_dropped_find_it_gone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = node.publish()
    waits, go_on, _ = hold_reads(monkeypatch)
    stager = node.stager()
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(stager.stage, digest, EXACT_LAYOUT)
        assert waits.wait(30)
        others = [threads.submit(stager.stage, digest, EXACT_LAYOUT) for _ in range(2)]
        time.sleep(0.1)
        original = stager._lease_if_there
        monkeypatch.setattr(stager, "_lease_if_there", lambda block: (node.disk.remove(digest), original(block))[1])
        stager.drop(digest)
        go_on.set()
        block, _ = first.result(30)
        assert all(isinstance(each.exception(30), NotFound) for each in others)
    settle(stager)
    assert block.leases == 1
    stager.release(block)
    check_invariants(stager)
    assert stager.arena.used_bytes == 0


def test_what_was_never_there_can_be_dropped(node: Node) -> None:
    node.stager().drop("0" * 64)


# ---- the writer ----


def test_a_block_stays_while_it_is_written(node: Node, short_wait: None) -> None:
    first, second = node.publish(), node.publish()
    files = SlowFiles(node.files.root)
    stager = node.stager(node.nbytes(first), files)
    stager.release(stager.stage(first, EXACT_LAYOUT)[0])
    assert files.began.wait(30)
    with pytest.raises(Unavailable):
        stager.stage(second, EXACT_LAYOUT)
    files.go_on.set()
    settle(stager)
    block, _ = stager.stage(second, EXACT_LAYOUT)
    stager.release(block)
    check_invariants(stager)
    reread, source = node.stager().stage(first, EXACT_LAYOUT)
    assert source == PACKED
    assert reread.leases == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("odd")])
def test_a_writer_that_fails_takes_no_lease_with_it(
    node: Node, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(node.files, "write", fail)
    digest = node.publish()
    stager = node.stager()
    block, _ = stager.stage(digest, EXACT_LAYOUT)
    settle(stager)
    assert block.leases == 1
    check_invariants(stager)


def test_a_stager_that_closes_finishes_what_it_writes_and_writes_no_more(node: Node) -> None:
    first, second = node.publish(), node.publish()
    stager = node.stager()
    stager.stage(first, EXACT_LAYOUT)
    stager.close()
    assert node.packed_file(first).exists()
    block, source = stager.stage(second, EXACT_LAYOUT)
    assert (source, block.leases) == (FOLDER, 1)
    assert not node.packed_file(second).exists()


# ---- anything in any order ----


@settings(max_examples=60)
@given(st.data())
def test_any_sequence_keeps_leased_blocks_as_they_are(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    node, digests, expected = world(tmp_path_factory)
    stager = node.stager(data.draw(st.sampled_from([3, 6, 12, 20])) * 4096, NoFiles(node.files.root))
    held: list[tuple[Block, str, bytes]] = []
    original, stager_module.WAIT_S = stager_module.WAIT_S, 0.0
    try:
        for _ in range(data.draw(st.integers(1, 25))):
            act = data.draw(st.sampled_from(["stage", "stage", "stage", "release", "release", "drop"]))
            if act == "stage":
                digest = data.draw(st.sampled_from(digests))
                settle(stager)
                try:
                    block, _ = stager.stage(digest, EXACT_LAYOUT)
                except Unavailable:
                    continue
                assert payload(content(stager, block), digest) == expected[digest]
                held.append((block, digest, content(stager, block)))
            elif act == "release" and held:
                stager.release(held.pop(data.draw(st.integers(0, len(held) - 1)))[0])
            elif act == "drop":
                stager.drop(data.draw(st.sampled_from(digests)))
            check_invariants(stager, held=[block for block, _, _ in held])
            for block, digest, before in held:
                assert content(stager, block) == before
                assert payload(before, digest) == expected[digest]
            for block in stager.blocks():
                assert block.leases == sum(each is block for each, _, _ in held)
        for block, _, _ in held:
            stager.release(block)
        check_invariants(stager)
        for digest in digests:
            stager.drop(digest)
        assert stager.arena.used_bytes == 0
    finally:
        stager_module.WAIT_S = original
        stager.close()


_WORLDS: list[tuple[Node, list[str], dict[str, bytes]]] = []


def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Node, list[str], dict[str, bytes]]:
    """A disk with a few adapters of several sizes, made once."""
    if not _WORLDS:
        node = Node(tmp_path_factory.mktemp("world"))
        digests = [node.publish(8), node.publish(8), node.publish(60), node.publish(100), node.publish(1, wide=True)]
        _WORLDS.append((node, digests, {digest: node.expected(digest) for digest in digests}))
    return _WORLDS[0]


def test_threads_at_once_never_see_anothers_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    node, digests, expected = world(tmp_path_factory)
    stager = node.stager(14 * 4096)
    stop_s = time.monotonic() + 1.5
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            while time.monotonic() < stop_s:
                digest = draw.choice(digests)
                if draw.random() < 0.05:
                    stager.drop(digest)
                block, _ = stager.stage(digest, EXACT_LAYOUT)
                for _ in range(draw.randrange(3)):
                    assert payload(stager.arena.view(block.offset, block.nbytes), digest) == expected[digest]
                    time.sleep(draw.random() / 1000)
                stager.release(block)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    check_invariants(stager)
    assert all(block.leases == 0 for block in stager.blocks())
    assert stager.evictions > 0
    for digest in digests:
        stager.drop(digest)
    assert stager.arena.used_bytes == 0
