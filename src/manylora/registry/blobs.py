"""The bytes of adapters in an object store: a bucket, or a local folder.

Layout: `adapters/<digest>/{adapter_config.json,adapter_model.safetensors}`, the config in its canonical form. An
object appears whole or not at all, and only if its bytes have the digest that it is stored under. It knows digests,
and neither names nor tenants.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from manylora.adapter import check_digest, shown
from manylora.errors import CorruptBlob, InvalidAdapter, InvalidSettings, Unavailable
from manylora.peft_config import CONFIG_FILE, WEIGHTS_FILE, digest_state
from manylora.registry.peft_format import MAX_CONFIG_BYTES
from manylora.registry.untrusted_files import open_plain

if TYPE_CHECKING:
    from obstore.store import ObjectStore

FILES = (CONFIG_FILE, WEIGHTS_FILE)
Progress = Callable[[int, int], None]
_CHUNK_BYTES = 1 << 20
_ROOT = "adapters"
_LOCAL = "file://"
_REQUEST_TIMEOUT = "1h"  # of one whole transfer, which may be gigabytes
_ABANDONED_AFTER_S = 3600.0


class BlobStore:
    """An object store of adapters. Thread-safe."""

    def __init__(self, store: ObjectStore, url: str, local: Path | None = None) -> None:
        self._store = store
        self._url = url
        self._local = local

    @classmethod
    def open(cls, url: str) -> BlobStore:
        """Open the store at `url`: ``file:///folder``, ``s3://bucket/prefix``, ``gs://…``, ``az://…``."""
        if url.startswith(_LOCAL):
            return cls._open_local(Path(url.removeprefix(_LOCAL)), url)
        try:
            if url.startswith("memory:"):
                return cls(from_url(url), url)
            return cls(from_url(url, client_options={"timeout": _REQUEST_TIMEOUT}), url)
        except (BaseError, OSError, ValueError) as error:
            raise InvalidSettings(
                f"the object store URL {shown(url, 200)} cannot be used: {_reason(error)}",
                "MANYLORA_BLOB_URL looks like file:///folder or s3://bucket/prefix",
            ) from error

    @classmethod
    def _open_local(cls, folder: Path, url: str) -> BlobStore:
        if not folder.is_absolute():
            raise InvalidSettings(f"the object store URL {shown(url, 200)} is relative", "write file:///folder")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return cls(LocalStore(folder), url, folder)
        except (BaseError, OSError) as error:
            raise Unavailable(
                f"the object store {shown(url, 200)} cannot be opened: {_reason(error)}",
                "set MANYLORA_BLOB_URL to a folder that you may write",
            ) from error

    def put(self, digest: str, config: bytes, weights: Path, progress: Progress | None = None) -> None:
        """Store an adapter, unless it is there. Nothing appears where the file does not have this digest any more."""
        self._sweep(digest)
        weights_bytes = weights.stat().st_size
        with self._translated("stored"):
            if self._size(digest, WEIGHTS_FILE) != weights_bytes:
                obstore.put(self._store, _key(digest, WEIGHTS_FILE), _checked(digest, config, weights, progress))
            if self._size(digest, CONFIG_FILE) != len(config):
                obstore.put(self._store, _key(digest, CONFIG_FILE), config)
        self._flush(digest)
        if progress is not None:
            progress(weights_bytes, weights_bytes)

    def get_to(self, digest: str, into: Path) -> None:
        """Write the adapter's files into a folder; `CorruptBlob` where they are missing or lack this digest."""
        with (into / CONFIG_FILE).open("wb") as config, (into / WEIGHTS_FILE).open("wb") as weights:
            self._read(digest, config.write, weights.write)

    def verify(self, digest: str) -> None:
        """Read the adapter and compare its digest; `CorruptBlob` says what is wrong."""
        self._read(digest, len, len)

    def files(self, digest: str) -> dict[str, int]:
        """The adapter's stored files and their sizes."""
        sizes = {name: self._size(digest, name) for name in FILES}
        return {name: size for name, size in sizes.items() if size is not None}

    def exists(self, digest: str) -> bool:
        return len(self.files(digest)) == len(FILES)

    def delete(self, digest: str) -> None:
        """Delete an adapter's files, those that are there."""
        for name in self.files(digest):
            with self._translated("deleted"):
                obstore.delete(self._store, _key(digest, name))

    def digests(self) -> list[str]:
        """All digests with a stored weights file, sorted."""
        with self._translated("listed"):
            paths = [entry["path"] for page in obstore.list(self._store, _ROOT) for entry in page]
        return sorted(path.split("/")[-2] for path in paths if path.endswith(f"/{WEIGHTS_FILE}"))

    def _read(self, digest: str, config_sink: Callable[[bytes], int], weights_sink: Callable[[bytes], int]) -> None:
        config = b"".join(self._stream(digest, CONFIG_FILE, MAX_CONFIG_BYTES))
        config_sink(config)
        found = digest_state(config)
        for chunk in self._stream(digest, WEIGHTS_FILE):
            found.update(chunk)
            weights_sink(chunk)
        if found.hexdigest() != digest:
            raise CorruptBlob(
                f"the stored bytes of {digest} have the digest {found.hexdigest()}",
                f"delete {_key(digest, '')} from the object store and push the adapter again",
            )

    def _stream(self, digest: str, name: str, max_bytes: int | None = None) -> Iterator[bytes]:
        with self._translated("read"):
            try:
                result = obstore.get(self._store, _key(digest, name))
            except FileNotFoundError as error:
                raise CorruptBlob(
                    f"{_key(digest, name)} is missing from the object store", "push the adapter again"
                ) from error
            if max_bytes is not None and result.meta["size"] > max_bytes:
                raise CorruptBlob(f"{_key(digest, name)} is larger than it can be", "push the adapter again")
            for chunk in result.stream(min_chunk_size=_CHUNK_BYTES):
                yield bytes(chunk)

    def _size(self, digest: str, name: str) -> int | None:
        with self._translated("looked up"):
            try:
                return obstore.head(self._store, _key(digest, name))["size"]
            except FileNotFoundError:
                return None

    def _flush(self, digest: str) -> None:
        """A local store leaves the bytes in the page cache; bring them, and their names, to stable storage.

        Also where they were there already: an earlier push may have been killed before it came to this.
        """
        if self._local is None:
            return
        folder = self._local / _key(digest, "")
        with self._translated("flushed"):
            for step in (folder / WEIGHTS_FILE, folder / CONFIG_FILE, folder, folder.parent, self._local):
                descriptor = os.open(step, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def _sweep(self, digest: str) -> None:
        """Delete what a killed upload of the same content left in a local store (buckets expire such parts)."""
        if self._local is None:
            return
        before = time.time() - _ABANDONED_AFTER_S
        with self._translated("swept"):
            for file in (self._local / _key(digest, "")).glob("*#*"):
                if file.stat().st_mtime < before:
                    file.unlink(missing_ok=True)

    @contextmanager
    def _translated(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            reason = _reason(error)
            full = "no space" in reason.lower() or "quota" in reason.lower()
            raise Unavailable(
                f"an adapter could not be {verb} in the object store {shown(self._url, 200)}: {reason}",
                "free some space there" if full else "check MANYLORA_BLOB_URL and that the store answers",
            ) from error


def _checked(digest: str, config: bytes, weights: Path, progress: Progress | None) -> Iterator[bytes]:
    """The file's chunks. It raises after the last one, which calls the upload off, if the digest is another."""
    found, done = digest_state(config), 0
    with open_plain(weights) as file:
        total = os.fstat(file.fileno()).st_size
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
            yield chunk
    if found.hexdigest() != digest:
        raise InvalidAdapter(f"{WEIGHTS_FILE} changed while it was read", "wait until it is written, then push again")


def _key(digest: str, name: str) -> str:
    return f"{_ROOT}/{check_digest(digest)}/{name}"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return shown(lines[0], 200) if lines else type(error).__name__
