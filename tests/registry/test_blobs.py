from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from manylora.errors import CorruptBlob, InvalidAdapter, InvalidName, InvalidSettings, ManyloraError, Unavailable
from manylora.registry.blobs import BlobStore
from manylora.registry.peft_format import PeftAdapter, digest, read_peft_folder

Make = Callable[..., Path]


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return BlobStore.open(f"file://{tmp_path / 'odd %20#?name'}" if request.param == "local" else "memory:///")


@pytest.fixture
def adapter(make: Make) -> PeftAdapter:
    return read_peft_folder(make(), max_bytes=1 << 20)


def put(store: BlobStore, adapter: PeftAdapter) -> str:
    found = digest(adapter.config_bytes, adapter.weights)
    store.put(found, adapter.config_bytes, adapter.weights)
    return found


def test_what_is_put_comes_back(store: BlobStore, adapter: PeftAdapter, tmp_path: Path) -> None:
    found = put(store, adapter)
    put(store, adapter)
    into = tmp_path / "into"
    into.mkdir()
    store.get_to(found, into)
    store.verify(found)
    assert (into / "adapter_config.json").read_bytes() == adapter.config_bytes
    assert (into / "adapter_model.safetensors").read_bytes() == adapter.weights.read_bytes()
    assert store.files(found) == {
        "adapter_config.json": len(adapter.config_bytes),
        "adapter_model.safetensors": adapter.header.file_bytes,
    }
    assert store.exists(found)
    assert store.digests() == [found]
    store.delete(found)
    store.delete(found)
    assert not store.exists(found)
    assert store.digests() == []


def test_each_file_and_folder_is_flushed_once_and_again_after_a_killed_push(
    tmp_path: Path, adapter: PeftAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: flushed.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    blobs = tmp_path / "blobs"
    found = put(BlobStore.open(f"file://{blobs}"), adapter)
    folder = blobs / "adapters" / found
    expected = [folder / "adapter_model.safetensors", folder / "adapter_config.json", folder, folder.parent, blobs]
    assert flushed == [str(path) for path in expected]
    flushed.clear()
    put(BlobStore.open(f"file://{blobs}"), adapter)
    assert flushed == [str(path) for path in expected]


def test_a_file_without_the_digest_never_appears(store: BlobStore, adapter: PeftAdapter) -> None:
    with pytest.raises(InvalidAdapter, match="changed while it was read"):
        store.put("0" * 64, adapter.config_bytes, adapter.weights)
    assert store.digests() == []


def test_names_are_digests_only(store: BlobStore, adapter: PeftAdapter) -> None:
    for name in ("", "../x", "A" * 64, "0" * 63):
        with pytest.raises(InvalidName):
            store.put(name, adapter.config_bytes, adapter.weights)
        with pytest.raises(InvalidName):
            store.verify(name)


def test_missing_and_oversized_files(adapter: PeftAdapter, tmp_path: Path) -> None:
    store = BlobStore.open(f"file://{tmp_path / 'blobs'}")
    found = put(store, adapter)
    config = tmp_path / "blobs" / "adapters" / found / "adapter_config.json"
    config.write_bytes(b"x" * (2 << 20))
    with pytest.raises(CorruptBlob, match="larger"):
        store.verify(found)
    config.unlink()
    with pytest.raises(CorruptBlob, match="missing"):
        store.verify(found)
    put(store, adapter)
    store.verify(found)


def test_leftovers_of_a_killed_upload_are_swept(adapter: PeftAdapter, tmp_path: Path) -> None:
    store = BlobStore.open(f"file://{tmp_path / 'blobs'}")
    found = digest(adapter.config_bytes, adapter.weights)
    folder = tmp_path / "blobs" / "adapters" / found
    folder.mkdir(parents=True)
    for name in ("adapter_model.safetensors#1", "adapter_model.safetensors#2"):
        (folder / name).write_bytes(b"half")
    os.utime(folder / "adapter_model.safetensors#1", (time.time() - 7200,) * 2)
    put(store, adapter)
    assert sorted(file.name for file in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "adapter_model.safetensors#2",
    ]
    store.verify(found)


@pytest.mark.parametrize("url", ["", "nonsense", "bogus://x", "file://relative/x", "s3://", "http://"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        BlobStore.open(url)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(Unavailable, match="cannot be opened"):
        BlobStore.open(f"file://{tmp_path / 'file' / 'blobs'}")


def test_a_store_that_breaks(adapter: PeftAdapter, tmp_path: Path) -> None:
    store = BlobStore.open(f"file://{tmp_path / 'blobs'}")
    (tmp_path / "blobs").rmdir()
    (tmp_path / "blobs").write_text("now a file")
    for call in (lambda: put(store, adapter), lambda: store.verify("0" * 64), lambda: store.digests()):
        with pytest.raises(ManyloraError) as caught:
            call()
        assert "\n" not in str(caught.value)
