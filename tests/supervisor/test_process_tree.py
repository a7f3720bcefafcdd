"""Finding and ending descendants. What needs a subreaper runs in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manylora.supervisor import process_tree

NEST = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"


def test_descendants_without_a_subtree() -> None:
    child = subprocess.Popen([sys.executable, "-c", NEST], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    try:
        found = process_tree.descendants(os.getpid())
        assert found.index(child.pid) < found.index(grandchild)
        assert not {child.pid, grandchild} & set(process_tree.descendants(os.getpid(), without=[child.pid]))
    finally:
        process_tree.signal_all([grandchild, child.pid], signal.SIGKILL)
        child.communicate()
    assert child.pid not in process_tree.descendants(os.getpid())


@pytest.mark.parametrize("polite_s", [0.0, 0.3])
def test_end_descendants_ends_sessions_orphans_and_the_stubborn(polite_s: float) -> None:
    script = f"""
import os, subprocess, sys, time
from manylora.supervisor import process_tree
process_tree.adopt_orphans()
subprocess.Popen(["sleep", "60"])
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
middle = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True, " \\
         "stdout=subprocess.PIPE); p.stdout.readline(); p.returncode = 0"
subprocess.run([sys.executable, "-c", middle, stubborn], check=True)
assert len(process_tree.descendants(os.getpid())) == 2
assert process_tree.end_descendants(polite_s={polite_s}, limit_s=5.0) == []
assert process_tree.descendants(os.getpid()) == []
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_what_cannot_be_ended_in_time_is_named() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        others = set(process_tree.descendants(os.getpid())) - {child.pid}
        left = process_tree.end_descendants(polite_s=1.0, limit_s=0.0, without=others)
        assert left == [child.pid]
    finally:
        child.kill()
        child.wait()


def test_die_with_parent() -> None:
    script = f"""
import os, subprocess, sys
from manylora.supervisor import process_tree
own = os.getpid()
p = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: process_tree.die_with_parent(own), stdout={subprocess.DEVNULL})
print(p.pid, flush=True)
os._exit(0)
"""
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=30)
    # Both ends of the pipes were inherited by the child: the call above only returned because it died too.
    assert int(run.stdout) not in process_tree.descendants(1)


@pytest.mark.parametrize(
    ("counters", "expected"), [("nr_free 5\noom_kill 3\nx 1\n", 3), ("nr_free 5\noom_kill_x 3\n", None), (None, None)]
)
def test_the_kernels_count_of_kills_for_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counters: str | None, expected: int | None
) -> None:
    if counters is not None:
        (tmp_path / "vmstat").write_text(counters)
    monkeypatch.setattr(process_tree, "_PROC", tmp_path)
    assert process_tree.oom_kills() == expected
