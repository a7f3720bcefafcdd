"""Packed adapters on disk, so that an adapter is packed once and staged by one read after that.

Layout: `root/<layout key>/<digest>`, each file one block (`staging.packed_form`) with the SHA-256 of itself in its
header. Files can always be made anew: none is flushed, and one that is not whole is deleted by whoever finds it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from manylora.errors import CorruptBlob
from manylora.staging.packed_form import (
    PackedHeader,
    block_bytes,
    block_digest,
    payload_start,
    read_header,
    write_head,
)

log = logging.getLogger(__name__)

_HEAD_BYTES = 1 << 20
_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A packed adapter on disk."""

    path: Path
    nbytes: int
    used_s: float

    def remove(self) -> None:
        """Delete it, if it is still there."""
        self.path.unlink(missing_ok=True)


class PackedFiles:
    """The packed files of a node. Thread-safe: a file appears whole, under its final name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, layout_key: str, digest: str, room: Callable[[int], Any]) -> PackedHeader | None:
        """Read a packed adapter into the memory that `room(bytes)` gives; None where there is none that is whole.

        `room` may raise; what it gave is the caller's, whatever happens.
        """
        path = self._path(layout_key, digest)
        try:
            with path.open("rb", buffering=0) as file:
                header = read_header(file.read(_HEAD_BYTES))
                if (header.digest, header.layout) != (digest, layout_key):
                    raise CorruptBlob("a packed file is another adapter's")
                if os.fstat(file.fileno()).st_size != block_bytes(header):
                    raise CorruptBlob("a packed file has not the length that it tells")
                block = room(block_bytes(header))
                file.seek(0)
                _read_whole(file, block)
            if block_digest(block, header) != header.sha256:
                raise CorruptBlob("a packed file's bytes have changed")
        except FileNotFoundError:
            return None
        except (CorruptBlob, OSError) as error:
            log.warning("the packed file of %s is of no use and is made anew: %s", digest[:16], error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):  # the budget may have deleted it by now
            os.utime(path)
        return header

    def write(self, block: memoryview, header: PackedHeader) -> None:
        """Keep a block of memory as a file. A disk that is full is a reason to log, not to fail."""
        path = self._path(header.layout, header.digest)
        partial = path.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
        named = msgspec.structs.replace(header, sha256=block_digest(block, header))
        start = payload_start(header)
        head = bytearray(start)
        write_head(head, named)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb", buffering=0) as file:
                _write_whole(file, memoryview(head))
                _write_whole(file, block[start : start + header.payload_bytes])
            partial.rename(path)
        except OSError as error:
            log.warning("the packed form of %s is not kept on disk: %s", header.digest[:16], error.strerror)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def remove(self, digest: str) -> int:
        """Delete every packed form of a version; returns how many there were."""
        gone = 0
        for path in self.root.glob(f"*/{digest}"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                gone += 1
        return gone

    def entries(self) -> list[PackedFile]:
        """Every packed file that is whole."""
        found = []
        for path in self.root.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if not path.name.startswith(_PARTIAL):
                    found.append(PackedFile(path, status.st_size, status.st_mtime))
        return found

    def sweep_partial(self) -> None:
        """Delete what a killed agent left half-written; only the one agent of a node writes here."""
        for path in self.root.glob(f"*/{_PARTIAL}*"):
            path.unlink(missing_ok=True)

    def _path(self, layout_key: str, digest: str) -> Path:
        return self.root / layout_key / digest


def _read_whole(file: Any, block: memoryview) -> None:
    done = 0
    while done < len(block):
        count = file.readinto(block[done:])
        if not count:
            raise CorruptBlob("a packed file is cut off")
        done += count


def _write_whole(file: Any, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += file.write(data[done:])
