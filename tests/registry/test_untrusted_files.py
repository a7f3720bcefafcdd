from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from manylora.errors import InvalidAdapter
from manylora.registry.untrusted_files import inside, is_folder, open_plain, stamp


def test_plain_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    with open_plain(tmp_path / "x") as file:
        assert file.read() == b"abc"


def test_anything_else_is_refused_without_blocking(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in ("link", "loop", "pipe", "folder", "socket", "absent"):
            with pytest.raises(InvalidAdapter):
                open_plain(tmp_path / name)
    with pytest.raises(InvalidAdapter):
        open_plain(Path("/dev/zero"))
    with open_plain(tmp_path / "link", follow_links=True) as file:
        assert file.read() == b"abc"


def test_inside(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "real").write_text("x")
    (folder / "near").symlink_to("real")
    (folder / "far").symlink_to("../elsewhere")
    (folder / "loop").symlink_to("loop")
    assert inside(folder, "near") == inside(folder, "real") == folder.resolve() / "real"
    for name in ("far", "loop"):
        with pytest.raises(InvalidAdapter):
            open_plain(inside(folder, name))


def test_a_folder_reached_through_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("x")
    (tmp_path / "link").symlink_to("folder")
    assert inside(tmp_path / "link", "x").read_text() == "x"


def test_a_stamp_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    first = stamp(path)
    assert stamp(path) == first
    os.utime(path, ns=(0, first.modified_ns))
    path.write_bytes(b"abd")
    os.utime(path, ns=(0, first.modified_ns))
    assert stamp(path) != first


def test_is_folder(tmp_path: Path) -> None:
    assert is_folder(tmp_path)
    for path in (tmp_path / "absent", Path("a\0b"), Path("x" * 5000)):
        assert not is_folder(path)
