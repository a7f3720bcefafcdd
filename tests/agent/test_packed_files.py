"""Packed files: read whole and unchanged, or deleted and made anew; never another's."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from agent_node import EXACT_LAYOUT, LAYOUTS, PAGED_LAYOUT, Node, payload  # noqa: E402

from manylora.agent import packed_files  # noqa: E402
from manylora.agent.packed_files import PackedFiles  # noqa: E402
from manylora.errors import CorruptBlob, Unavailable  # noqa: E402
from manylora.staging.folder import read_folder  # noqa: E402
from manylora.staging.layout import EngineLayout  # noqa: E402
from manylora.staging.packed_form import (  # noqa: E402
    PackedHeader,
    block_bytes,
    fill,
    header_of,
    pack_weights,
    payload_start,
    read_header,
)

BOTH = pytest.mark.parametrize("engine", LAYOUTS, ids=["exact", "paged"])


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "disk")


def packed(node: Node, digest: str, engine: EngineLayout = EXACT_LAYOUT) -> tuple[bytearray, PackedHeader]:
    """A version's block."""
    read = read_folder(node.root / digest, engine)
    made = pack_weights(engine, read.weights)
    header = header_of(made, digest=digest, layout=engine, read=read)
    block = bytearray(block_bytes(header))
    fill(block, header, made)
    return block, header


def kept(node: Node, engine: EngineLayout = EXACT_LAYOUT) -> tuple[str, Path]:
    """A version with a packed file."""
    digest = node.publish()
    block, header = packed(node, digest, engine)
    node.files.write(memoryview(block), header)
    return digest, node.packed_file(digest, engine)


def read(node: Node, digest: str, engine: EngineLayout = EXACT_LAYOUT) -> bytes | None:
    """The payload that is read; None where there is nothing of use."""
    rooms: list[bytearray] = []

    def room(nbytes: int) -> memoryview:
        rooms.append(bytearray(nbytes))
        return memoryview(rooms[-1])

    header = node.files.read(engine.key, digest, room)
    if header is None:
        return None
    (memory,) = rooms
    assert read_header(memory) == header
    return payload(memory, digest, engine)


@BOTH
def test_what_was_written_is_read(node: Node, engine: EngineLayout) -> None:
    digest, path = kept(node, engine)
    assert read(node, digest, engine) == node.expected(digest, engine)
    assert [name.name for name in path.parent.iterdir()] == [digest]


def test_what_is_not_there_is_none(node: Node) -> None:
    assert read(node, "0" * 64) is None
    assert node.files.entries() == []
    assert node.files.remove("0" * 64) == 0
    node.files.sweep_partial()


def test_a_file_that_is_read_is_marked_as_used(node: Node) -> None:
    digest, path = kept(node)
    os.utime(path, (1.0, 1.0))
    read(node, digest)
    assert path.stat().st_mtime > 1e9


def of_no_use(node: Node, digest: str, path: Path, data: bytes) -> None:
    """Reading finds nothing, deletes the file, and takes no room that the file only claims."""
    path.write_bytes(data)

    def room(nbytes: int) -> memoryview:
        assert nbytes <= len(data)
        return memoryview(bytearray(nbytes))

    assert node.files.read(EXACT_LAYOUT.key, digest, room) is None
    assert not path.exists()


def test_a_file_cut_off_anywhere_is_of_no_use(node: Node) -> None:
    digest, path = kept(node)
    sound = path.read_bytes()
    header = read_header(sound)
    start = payload_start(header)
    text = 12 + len(msgspec.json.encode(header))
    for length in (0, 1, 7, 8, 11, 12, 13, text - 1, text, start - 1, start, start + 1, len(sound) - 1):
        of_no_use(node, digest, path, sound[:length])
    of_no_use(node, digest, path, sound + b"\0")


def test_a_bit_changed_anywhere_is_found(node: Node) -> None:
    """In the head too: there a digit moves weights to another module."""
    digest, path = kept(node)
    sound = path.read_bytes()
    header = read_header(sound)
    start = payload_start(header)
    text = 12 + len(msgspec.json.encode(header))
    for at in (*range(text), *range(start, len(sound), 97), len(sound) - 1):
        for bit in (1, 4):
            changed = bytearray(sound)
            changed[at] ^= bit
            if at >= start or not says_the_same(changed, header):
                of_no_use(node, digest, path, bytes(changed))


def says_the_same(changed: bytearray, header: PackedHeader) -> bool:
    """Whether the change is in the name of a field that has its default."""
    try:
        return read_header(changed) == header
    except CorruptBlob:
        return False


@pytest.mark.parametrize("size", [-1, 0, 1, 1 << 40, 1 << 62])
def test_no_file_takes_more_room_than_it_has(node: Node, size: int) -> None:
    digest, path = kept(node)
    sound = path.read_bytes()
    header = read_header(sound)
    text = msgspec.json.encode(msgspec.structs.replace(header, payload_bytes=size))
    of_no_use(node, digest, path, sound[:8] + len(text).to_bytes(4, "little") + text + sound[12 + len(text) :])


def test_anothers_file_is_never_taken(node: Node) -> None:
    mine, path = kept(node)
    _, theirs = kept(node)
    of_no_use(node, mine, path, theirs.read_bytes())


def test_a_file_of_another_layout_is_never_taken(node: Node) -> None:
    digest, path = kept(node, PAGED_LAYOUT)
    exact = node.packed_file(digest)
    exact.parent.mkdir(parents=True, exist_ok=True)
    of_no_use(node, digest, exact, path.read_bytes())


def test_what_cannot_be_read_is_none(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, path = kept(node)
    original = Path.open

    def fail(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == path:
            raise OSError(errno.EIO, "Input/output error")
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        assert read(node, digest) is None
    path.unlink(missing_ok=True)
    path.mkdir()
    assert read(node, digest) is None
    node.files.write(*_viewed(packed(node, digest)))
    assert [name.name for name in path.parent.iterdir()] == [digest], "a partial file remains"


def _viewed(made: tuple[bytearray, PackedHeader]) -> tuple[memoryview, PackedHeader]:
    return memoryview(made[0]), made[1]


def test_no_room_is_the_callers_affair_and_leaves_the_file(node: Node) -> None:
    digest, path = kept(node)

    def room(nbytes: int) -> memoryview:
        raise Unavailable("full")

    with pytest.raises(Unavailable):
        node.files.read(EXACT_LAYOUT.key, digest, room)
    assert path.exists()
    assert read(node, digest) == node.expected(digest)


def test_a_file_deleted_while_it_is_read_is_read_all_the_same(node: Node) -> None:
    digest, path = kept(node)
    memory: list[bytearray] = []

    def room(nbytes: int) -> memoryview:
        path.unlink()
        memory.append(bytearray(nbytes))
        return memoryview(memory[0])

    assert node.files.read(EXACT_LAYOUT.key, digest, room) is not None
    assert payload(memory[0], digest) == node.expected(digest)


@pytest.mark.parametrize("after", [0, 100, 5000])
def test_a_full_disk_leaves_nothing(node: Node, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    digest = node.publish()
    block, header = packed(node, digest)
    written = 0

    def full(file: Any, data: memoryview) -> None:
        nonlocal written
        file.write(data[: max(0, after - written)])
        written += len(data)
        if written > after:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packed_files, "_write_whole", full)
    node.files.write(memoryview(block), header)
    assert node.files.entries() == []
    assert list(node.files.root.glob("*/*")) == []
    assert read(node, digest) is None


def test_a_real_disk_that_is_full(node: Node) -> None:
    """`/dev/full` takes no byte."""
    digest = node.publish()
    block, header = packed(node, digest)
    with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        packed_files._write_whole(file, memoryview(block))
    (node.root / "file").write_bytes(b"")
    PackedFiles(node.root / "file").write(memoryview(block), header)


def test_a_file_appears_whole(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = node.publish()
    block, header = packed(node, digest)
    original, inside, go_on = packed_files._write_whole, threading.Event(), threading.Event()

    def slow(file: Any, data: memoryview) -> None:
        original(file, data)
        inside.set()
        assert go_on.wait(30)

    monkeypatch.setattr(packed_files, "_write_whole", slow)
    writer = threading.Thread(target=node.files.write, args=(memoryview(block), header))
    writer.start()
    assert inside.wait(30)
    assert read(node, digest) is None
    assert node.files.entries() == []
    assert node.files.remove(digest) == 0
    go_on.set()
    writer.join()
    assert read(node, digest) == node.expected(digest)


def test_what_a_killed_agent_left_is_swept(node: Node) -> None:
    digest, path = kept(node)
    left = path.with_name(".partial-0123456789abcdef")
    left.write_bytes(b"half")
    assert [entry.path for entry in node.files.entries()] == [path]
    node.files.sweep_partial()
    assert not left.exists()
    assert read(node, digest) == node.expected(digest)


def test_every_form_of_a_version_is_removed(node: Node) -> None:
    digest, _ = kept(node)
    block, header = packed(node, digest, PAGED_LAYOUT)
    node.files.write(memoryview(block), header)
    other, other_path = kept(node)
    assert node.files.remove(digest) == 2
    assert [entry.path for entry in node.files.entries()] == [other_path]
    assert read(node, other) == node.expected(other)


def test_entries_tell_bytes_and_time_of_use(node: Node) -> None:
    _, path = kept(node)
    os.utime(path, (7.0, 7.0))
    (entry,) = node.files.entries()
    assert (entry.path, entry.nbytes, entry.used_s) == (path, path.stat().st_size, 7.0)
    entry.remove()
    entry.remove()
    assert node.files.entries() == []
