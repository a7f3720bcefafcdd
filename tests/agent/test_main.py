"""`python -m manylora.agent`: what it takes, and how it begins and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manylora.agent.__main__ import budgets, parse_args
from manylora.errors import InvalidSettings
from manylora.settings import MIB, Settings


def settings(tmp_path: Path, **values: str) -> Settings:
    return Settings.from_env({f"MANYLORA_{name.upper()}": value for name, value in values.items()}, home=tmp_path)


def start(tmp_path: Path, *, http_socket: str = "h.sock", **values: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MANYLORA_")}
    own = {"home": str(tmp_path), "host_memory": "4MiB", **values}
    environment |= {f"MANYLORA_{name.upper()}": value for name, value in own.items()}
    command = [sys.executable, "-W", "error", "-m", "manylora.agent", "--socket", str(tmp_path / "a.sock")]
    command += ["--http-socket", str(tmp_path / http_socket)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def answers(path: Path, request: bytes = b"") -> bytes | None:
    """What comes back on a socket; None where nobody listens."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        if connection.connect_ex(str(path)) != 0:
            return None
        connection.sendall(request)
        return connection.recv(1000) if request else b""


def wait_until_well(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 60
    while not (answers(tmp_path / "h.sock", b"GET /healthz HTTP/1.0\r\n\r\n") or b"").startswith(b"HTTP/1.0 200"):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


# ---- settings ----


def test_both_sockets_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--socket", "a"], ["--http-socket", "h"]):
        with pytest.raises(SystemExit) as caught:
            parse_args(argv)
        assert caught.value.code == 2
        assert "required" in capsys.readouterr().err


def test_budgets_are_sizes_or_shares(tmp_path: Path) -> None:
    host, disk = budgets(settings(tmp_path, host_memory="3MiB", disk_budget="7MiB"))
    assert (host, disk) == (3 * MIB, 7 * MIB)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host, disk = budgets(settings(tmp_path, host_memory="50%", disk_budget="50%", disk_tier=str(tmp_path / "x" / "y")))
    assert host == total // 2
    assert disk > 0


@pytest.mark.parametrize("values", [{"host_memory": "lots"}, {"disk_budget": "-1"}, {"host_memory": "91%"}], ids=str)
def test_sizes_that_cannot_be_read_are_refused(tmp_path: Path, values: dict[str, str]) -> None:
    with pytest.raises(InvalidSettings):
        budgets(settings(tmp_path, **values))


@pytest.mark.parametrize("size", ["1", "4095"])
def test_memory_for_nothing_is_refused(tmp_path: Path, size: str) -> None:
    with pytest.raises(InvalidSettings, match="holds no adapter"):
        budgets(settings(tmp_path, host_memory=size))


# ---- the process ----


def test_wrong_usage_is_told_at_once_and_is_2(tmp_path: Path) -> None:
    for values in ({"host_memory": "lots"}, {"host_memory": "100"}, {"hots_memory": "1GiB"}):
        process = start(tmp_path, **values)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2
        assert errors.startswith("manylora agent: ")
        assert "Traceback" not in errors


def test_a_socket_that_cannot_be_made_is_1(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    process = start(tmp_path, http_socket="absent/h.sock")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in errors


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(tmp_path: Path, ending: signal.Signals) -> None:
    pytest.importorskip("torch")
    left = tmp_path / "disk" / ".packed" / "layout" / ".partial-00"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    for name in ("a.sock", "h.sock"):
        with socket.socket(socket.AF_UNIX) as killed:  # left by a life that was killed
            killed.bind(str(tmp_path / name))
    process = start(tmp_path)
    try:
        wait_until_well(tmp_path, process)
        assert answers(tmp_path / "a.sock") == b""
        assert not left.exists()
        assert os.getpriority(os.PRIO_PROCESS, process.pid) >= 5
        process.send_signal(ending)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "the agent is ready: 4 MiB" in errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait(30)


def test_without_pytorch_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')\n")
    sockets = ["--socket", str(tmp_path / "a"), "--http-socket", str(tmp_path / "h")]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "MANYLORA_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "manylora.agent", *sockets],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "torch is not installed" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
