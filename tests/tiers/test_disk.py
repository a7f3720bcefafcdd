from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from manylora.errors import CorruptBlob, InvalidName, Unavailable
from manylora.tiers.disk import PARTIAL_PREFIX, DiskTier

A = "a" * 64
B = "a" * 16 + "b" * 48
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "disk")


def fill(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"weights")
    (folder / "adapter_config.json").write_bytes(b"{}")


def fail(folder: Path) -> None:
    fill(folder)
    raise CorruptBlob("the bytes are bad")


def partials(tier: DiskTier) -> list[Path]:
    return list(tier.root.glob(f"{PARTIAL_PREFIX}*"))


def test_a_folder_is_filled_once(tier: DiskTier) -> None:
    assert tier.path(A) is None
    folder = tier.ensure(A, fill)
    assert folder == tier.path(A) == tier.root / A
    assert tier.ensure(A, fail) == folder
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", WEIGHTS]
    assert tier.digests() == [A]
    assert partials(tier) == []


def test_a_failed_download_leaves_nothing_and_may_be_tried_again(tier: DiskTier) -> None:
    with pytest.raises(CorruptBlob):
        tier.ensure(A, fail)
    assert tier.path(A) is None
    assert partials(tier) == []
    assert tier.ensure(A, fill).is_dir()


def test_threads_share_one_download(tier: DiskTier) -> None:
    calls: list[Path] = []

    def slow(folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.2)
        fill(folder)

    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(tier.ensure(A, slow))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert found == [tier.root / A] * 8


def test_threads_share_the_error_too(tier: DiskTier) -> None:
    errors: list[BaseException] = []

    def slow_fail(folder: Path) -> None:
        time.sleep(0.2)
        fail(folder)

    def ask() -> None:
        try:
            tier.ensure(A, slow_fail)
        except CorruptBlob as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4


def test_two_digests_do_not_wait_for_each_other(tier: DiskTier) -> None:
    inside = threading.Event()
    let_go = threading.Event()

    def held(folder: Path) -> None:
        inside.set()
        assert let_go.wait(10)
        fill(folder)

    thread = threading.Thread(target=tier.ensure, args=(A, held))
    thread.start()
    assert inside.wait(10)
    assert tier.path(A) is None
    assert tier.digests() == []
    tier.ensure(B, fill)
    assert tier.sweep_partial() == 0, "work in progress was swept"
    let_go.set()
    thread.join()
    assert tier.digests() == [A, B]


def test_several_processes_fill_the_same_folder(tier: DiskTier) -> None:
    program = (
        "import sys, pathlib, time; from manylora.tiers.disk import DiskTier\n"
        "def fill(folder):\n"
        "    (folder / 'adapter_config.json').write_bytes(b'{}'); time.sleep(0.3)\n"
        "    (folder / 'adapter_model.safetensors').write_bytes(b'weights')\n"
        "print(DiskTier(pathlib.Path(sys.argv[1])).ensure(sys.argv[2], fill))\n"
    )
    command = [sys.executable, "-W", "error", "-c", program, str(tier.root), A]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert outputs == [str(tier.root / A)] * 4
    assert partials(tier) == []
    assert (tier.root / A / WEIGHTS).read_bytes() == b"weights"


def test_what_a_killed_process_left_is_swept(tier: DiskTier) -> None:
    program = (
        "import os, signal, sys, pathlib; from manylora.tiers.disk import DiskTier\n"
        "def fill(folder):\n"
        "    (folder / 'adapter_model.safetensors').write_bytes(b'wei')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "DiskTier(pathlib.Path(sys.argv[1])).ensure(sys.argv[2], fill)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tier.root), A], timeout=60)
    assert killed.returncode == -9
    assert len(partials(tier)) == 1
    assert (tier.path(A), tier.digests(), tier.find_prefix(A[:16])) == (None, [], [])
    assert tier.sweep_partial() == 1
    assert partials(tier) == []
    assert tier.ensure(A, fill).is_dir()


def test_prefixes(tier: DiskTier) -> None:
    assert tier.find_prefix(A[:16]) == []
    tier.ensure(A, fill)
    assert tier.find_prefix(A[:16]) == [(A, tier.root / A)]
    tier.ensure(B, fill)
    assert [digest for digest, _ in tier.find_prefix(A[:16])] == [A, B]
    assert tier.find_prefix("0" * 16) == []


def test_names_never_reach_a_path(tier: DiskTier) -> None:
    tier.ensure(A, fill)
    for name in ("", ".", "..", "../" + "a" * 61, "/" + "a" * 63, "A" * 64, "a" * 65, "a" * 63 + "\n", "a" * 10_000):
        for call in (tier.path, tier.remove, lambda name: tier.ensure(name, fill), tier.find_prefix):
            with pytest.raises(InvalidName):
                call(name)


def test_remove(tier: DiskTier) -> None:
    assert not tier.remove(A)
    tier.ensure(A, fill)
    assert tier.remove(A)
    assert tier.path(A) is None
    assert partials(tier) == []


def test_strangers_in_the_folder_are_ignored(tier: DiskTier) -> None:
    tier.ensure(A, fill)
    (tier.root / "lost+found").mkdir()
    (tier.root / B).write_text("a file, no folder")
    assert tier.digests() == [A]
    assert tier.path(B) is None
    assert tier.sweep_partial() == 0


def test_a_disk_that_cannot_take_it(tmp_path: Path, tier: DiskTier) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(Unavailable, match="disk tier"):
        DiskTier(tmp_path / "file" / "disk").ensure(A, fill)

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(Unavailable, match="No space left") as caught:
        tier.ensure(A, full)
    assert "free some space" in caught.value.hint
    assert partials(tier) == []


def test_an_empty_or_absent_root(tier: DiskTier) -> None:
    assert tier.digests() == []
    assert tier.sweep_partial() == 0
