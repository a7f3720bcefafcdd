"""A push at lower priority: in a session of its own where sessions are scheduled as groups, and one process to its
caller all the same."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manylora.cli.giving_way import NICE

GROUPED = Path("/proc/sys/kernel/sched_autogroup_enabled")
GIVE_WAY = "import os, sys, time, signal\nfrom manylora.cli.giving_way import give_way\ngive_way()\n"


@contextlib.contextmanager
def started(code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", GIVE_WAY + code], stdout=subprocess.PIPE, text=True) as process:
        yield process


def sessions_are_groups() -> bool:
    return GROUPED.exists() and GROUPED.read_text().strip() == "1"


def test_it_is_nice_and_so_is_its_group() -> None:
    code = "print(os.getpriority(os.PRIO_PROCESS, 0), open('/proc/self/autogroup').read() if GROUPED else '')"
    with started(code.replace("GROUPED", str(sessions_are_groups()))) as process:
        out, _ = process.communicate(timeout=20)
    assert out.split()[0] == str(max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    if sessions_are_groups():
        assert out.split()[-1] == str(NICE)


@pytest.mark.parametrize("status", [0, 1, 7])
def test_the_exit_status_is_the_command_s(status: int) -> None:
    with started(f"sys.exit({status})") as process:
        assert process.wait(timeout=20) == status


def test_output_is_written_once() -> None:
    with started("print('once')") as process:
        assert process.communicate(timeout=20)[0] == "once\n"


def test_a_signal_reaches_the_command() -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\nprint('ready', flush=True)\ntime.sleep(30)"
    with started(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(timeout=20) == 3


def test_ctrl_c_ends_it_as_it_ends_any_command() -> None:
    with started("signal.signal(signal.SIGINT, signal.SIG_DFL)\nprint('ready', flush=True)\ntime.sleep(30)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == -signal.SIGINT


def test_killed_it_leaves_nothing_running() -> None:
    with started("print(os.getpid(), flush=True)\ntime.sleep(30)") as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 5
    while _runs(worker):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
