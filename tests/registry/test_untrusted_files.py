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


def hub_cache(root: Path) -> tuple[Path, Path]:
    """A snapshot and the blobs of one repository, as the hub's client lays them out."""
    repository = root / "models--org--adapter"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "deadbeef").write_text("x")
    return snapshot, blobs


def test_a_snapshot_of_the_hub_may_link_to_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = hub_cache(tmp_path)
    (snapshot / "x").symlink_to("../../blobs/deadbeef")
    (snapshot / "sub").mkdir()
    (snapshot / "sub" / "x").symlink_to("../../../blobs/deadbeef")
    for folder in (snapshot, snapshot / "sub"):
        assert inside(folder, "x") == blobs.resolve() / "deadbeef"
        with open_plain(inside(folder, "x")) as file:
            assert file.read() == b"x"


def test_a_snapshot_may_link_nowhere_else(tmp_path: Path) -> None:
    snapshot, blobs = hub_cache(tmp_path)
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (blobs / "deep").mkdir()
    (snapshot.parent / "other").mkdir()
    for place in (tmp_path, other, blobs / "deep", snapshot.parent / "other", blobs.parent):
        (place / "secret").write_text("secret")
        (snapshot / "x").unlink(missing_ok=True)
        (snapshot / "x").symlink_to(place / "secret")
        with pytest.raises(InvalidAdapter, match="leaves the folder"):
            inside(snapshot, "x")
    (blobs / "onwards").symlink_to(tmp_path / "secret")
    (snapshot / "y").symlink_to("../../blobs/onwards")
    with pytest.raises(InvalidAdapter, match="leaves the folder"):
        inside(snapshot, "y")


def test_blobs_that_are_themselves_a_link_are_refused(tmp_path: Path) -> None:
    snapshot, blobs = hub_cache(tmp_path)
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    (snapshot / "x").symlink_to("../../blobs/deadbeef")
    with pytest.raises(InvalidAdapter, match="leaves the folder"):
        inside(snapshot, "x")


def test_only_a_hub_cache_has_blobs(tmp_path: Path) -> None:
    snapshot, blobs = hub_cache(tmp_path)
    (snapshot / "x").symlink_to("../../blobs/deadbeef")
    snapshot.parent.parent.rename(tmp_path / "my-models")
    with pytest.raises(InvalidAdapter, match="leaves the folder"):
        inside(tmp_path / "my-models" / "snapshots" / snapshot.name, "x")
    assert not blobs.exists()


def test_a_folder_that_becomes_a_link_after_the_check_leads_nowhere(tmp_path: Path) -> None:
    snapshot, blobs = hub_cache(tmp_path)
    (snapshot / "x").symlink_to("../../blobs/deadbeef")
    real = inside(snapshot, "x")
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "deadbeef").write_text("secret")
    blobs.rename(tmp_path / "old")
    blobs.symlink_to(secrets)
    with pytest.raises(InvalidAdapter, match="became a link"):
        open_plain(real)


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
