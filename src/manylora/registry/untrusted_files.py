"""Opening files that someone else wrote: plain files only, never through a link that leaves the folder, never blocking.

The caller may be a gateway reading a path that came in a request, so a name, a link or a device that could lead it
elsewhere is refused rather than followed. One kind of link is no surprise: in a cache of the Hugging Face hub, the
files of `models--*/snapshots/<revision>` are links to `models--*/blobs`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, NamedTuple

from manylora.adapter import shown
from manylora.errors import InvalidAdapter


class FileStamp(NamedTuple):
    """What changes when a file's content does; compared before and after reading it several times."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def open_plain(path: Path, *, follow_links: bool = False) -> BinaryIO:
    """Open a regular file for reading; `InvalidAdapter` for links (unless allowed), folders, pipes and devices."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise _refusal(path, error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidAdapter(f"{shown(path.name)} is not a plain file", "put the file itself in the folder")
    if not follow_links and _was_led_elsewhere(descriptor, path):
        os.close(descriptor)
        raise InvalidAdapter(
            f"{shown(path.name)} is not where it was found: a folder above it was moved, or became a link",
            "push it again when nothing else changes its folder",
        )
    return os.fdopen(descriptor, "rb")


def _was_led_elsewhere(descriptor: int, path: Path) -> bool:
    """Whether what was opened lies at another place than `path`, by the kernel's own account of the open file."""
    return Path(f"/proc/self/fd/{descriptor}").readlink() != path.absolute()


def stamp(path: Path) -> FileStamp:
    """The stamp of a file that `open_plain` would open."""
    with open_plain(path) as file:
        found = os.fstat(file.fileno())
    return FileStamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def is_folder(path: Path) -> bool:
    """Whether there is a folder at `path`; False too for what cannot even be a path."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def inside(folder: Path, name: str) -> Path:
    """The real path of `folder/name`; `InvalidAdapter` where it is a link that leaves the folder or hub cache."""
    path = folder / name
    try:
        real, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidAdapter(f"{shown(name)} cannot be read: {error}", "check the path and its links") from error
    if real.parent != root and real.parent != _hub_blobs(root):
        raise InvalidAdapter(
            f"{shown(name)} is a link that leaves the folder",
            "copy the folder with its links resolved (`cp -rL`) and push the copy",
        )
    return real


def _hub_blobs(root: Path) -> Path | None:
    """Where the links of a snapshot in a hub cache lead: the blobs of the same repository."""
    for snapshot in (root, *root.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and repository.name.startswith("models--"):
            return repository / "blobs"
    return None


def _refusal(path: Path, error: OSError) -> InvalidAdapter:
    name = shown(path.name)
    if error.errno == errno.ELOOP:
        return InvalidAdapter(f"{name} is a symbolic link", "put the file itself in the folder")
    if error.errno == errno.ENOENT:
        return InvalidAdapter(f"{name} is missing from {shown(str(path.parent))}", "save the adapter again with PEFT")
    return InvalidAdapter(f"{name} cannot be read: {error.strerror}", "check the file's permissions")
