"""The disk tier: complete adapter folders named by digest, on the node's own disk.

Layout: `root/<64 hex digest>/{adapter_config.json,adapter_model.safetensors}`. A folder under its digest's name is
complete and never changes: it is filled beside under a name that starts with `.partial-`, flushed, and renamed into
place. Several processes may do so at once. While a process fills a folder it holds an advisory lock on it, so that
whatever a killed process left behind can be told from work in progress and swept away. Names from callers never
reach a path: only digests do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from manylora.adapter import DIGEST_HEX_CHARS, ENGINE_DIGEST_CHARS, check_digest
from manylora.errors import InvalidName, Unavailable

PARTIAL_PREFIX = ".partial-"
_HEX = frozenset("0123456789abcdef")
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)


class DiskTier:
    """The folders under one root. Thread-safe; cheap to construct; touches the disk only when asked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._flights: dict[str, Future[Path]] = {}

    def path(self, digest: str) -> Path | None:
        """The complete folder of `digest`, or None where it is not on this disk."""
        folder = self.root / check_digest(digest)
        return folder if folder.is_dir() else None

    def digests(self) -> list[str]:
        """Digests of all complete folders, sorted."""
        return sorted(self._names())

    def find_prefix(self, hex16: str) -> list[tuple[str, Path]]:
        """All complete folders whose digest starts with these 16 hex characters (more than one only by collision)."""
        if len(hex16) != ENGINE_DIGEST_CHARS or not _HEX.issuperset(hex16):
            raise InvalidName("a digest prefix has 16 lower-case hexadecimal characters")
        return [(name, self.root / name) for name in sorted(self._names()) if name.startswith(hex16)]

    def ensure(self, digest: str, download: Callable[[Path], None]) -> Path:
        """The complete folder of `digest`, filled by `download(empty folder)` if it isn't there yet.

        Threads that ask for the same digest share one download, and its error if it fails.
        """
        if (folder := self.path(digest)) is not None:
            with contextlib.suppress(OSError):
                os.utime(folder)  # whoever keeps the disk within a budget deletes what was used longest ago
            return folder
        with self._lock:
            flight = self._flights.get(digest)
            mine = flight is None
            if flight is None:
                flight = self._flights[digest] = Future()
        if mine:
            self._fly(digest, download, flight)
        return flight.result()

    def remove(self, digest: str) -> bool:
        """Delete the folder of `digest`; False where there was none. Never leaves half a folder under its name."""
        folder = self.root / check_digest(digest)
        doomed = self.root / f"{PARTIAL_PREFIX}{secrets.token_hex(8)}"
        try:
            folder.rename(doomed)
        except FileNotFoundError:
            return False
        shutil.rmtree(doomed, ignore_errors=True)
        return True

    def sweep_partial(self) -> int:
        """Delete what killed processes left half-filled; folders being filled now stay. Returns how many went."""
        return sum(_sweep(folder) for folder in self._partials())

    def _names(self) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                if len(entry.name) == DIGEST_HEX_CHARS and _HEX.issuperset(entry.name) and entry.is_dir():
                    yield entry.name

    def _partials(self) -> list[Path]:
        return list(self.root.glob(f"{PARTIAL_PREFIX}*")) if self.root.is_dir() else []

    def _fly(self, digest: str, download: Callable[[Path], None], flight: Future[Path]) -> None:
        """Fill the folder and settle the flight; whatever goes wrong reaches everyone who waits on it."""
        try:
            folder = self.path(digest) or self._fill(digest, download)
        except BaseException as error:
            flight.set_exception(error)
        else:
            flight.set_result(folder)
        finally:
            with self._lock:
                del self._flights[digest]

    def _fill(self, digest: str, download: Callable[[Path], None]) -> Path:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with _partial_folder(self.root) as partial:
                download(partial)
                _flush(partial)
                return self._publish(partial, digest)
        except OSError as error:
            raise Unavailable(
                f"the disk tier {self.root} cannot take an adapter: {error.strerror or error}",
                "free some space there, or set MANYLORA_DISK_TIER to another folder",
            ) from error

    def _publish(self, partial: Path, digest: str) -> Path:
        folder = self.root / digest
        try:
            partial.rename(folder)
        except OSError as error:
            # Another process was faster; its folder has the same content, for both checked the digest.
            if error.errno not in _TAKEN or not folder.is_dir():
                raise
        _flush_folder(self.root)
        return folder


@contextlib.contextmanager
def _partial_folder(root: Path) -> Iterator[Path]:
    """A new, locked, empty folder beside the complete ones; gone afterwards unless it was renamed into place."""
    while True:
        folder = root / f"{PARTIAL_PREFIX}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o755)
        if (lock := _try_lock(folder)) is not None:
            break  # else a sweeper took it in the instant before the lock, and deletes it
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, or None where another process holds it or the folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == folder.stat().st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _sweep(folder: Path) -> bool:
    lock = _try_lock(folder)
    if lock is None:
        return False
    try:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        os.close(lock)


def _flush(folder: Path) -> None:
    """Bring the folder's files and their names to stable storage before it gets its final name."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
