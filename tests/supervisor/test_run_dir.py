"""The run folder and who owns it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from manylora.errors import Conflict, InvalidSettings
from manylora.supervisor.run_dir import SOCKET_PATH_MAX_BYTES, owned


def test_it_is_private_and_names_its_owner(tmp_path: Path) -> None:
    with owned(tmp_path / "a" / "run") as run_dir:
        assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
        assert (run_dir.path / "supervisor.lock").read_text() == f"{os.getpid()}\n"
        assert run_dir.engine_socket == tmp_path / "a" / "run" / "engine.sock"


def test_a_loose_folder_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with owned(tmp_path):
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_it_has_one_owner(tmp_path: Path) -> None:
    with owned(tmp_path), pytest.raises(Conflict, match=f"pid {os.getpid()}"), owned(tmp_path):
        pass
    with owned(tmp_path):
        pass


def test_processes_of_a_dead_owner_are_waited_for_and_named(tmp_path: Path) -> None:
    with owned(tmp_path) as run_dir:
        heir = subprocess.Popen(
            [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"],
            pass_fds=(run_dir.lock_fd,),
            stdout=subprocess.PIPE,
        )
        dead = subprocess.Popen(["true"])
        dead.wait()
        os.pwrite(run_dir.lock_fd, f"{dead.pid}\n".encode().ljust(20), 0)
    try:
        with pytest.raises(Conflict, match=f"earlier.*pid {dead.pid}"), owned(tmp_path, previous_run_limit_s=0.2):
            pass
    finally:
        heir.kill()
        heir.communicate()
    with owned(tmp_path):
        pass


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * SOCKET_PATH_MAX_BYTES)
    with pytest.raises(InvalidSettings, match="allows 107") as caught, owned(long):
        pass
    assert "MANYLORA_RUN_DIR" in caught.value.hint
    assert not long.exists()


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(InvalidSettings, match="cannot be used"), owned(tmp_path / "run"):
        pass
