"""Descendants of a process, found in /proc, and how all of them are ended.

Owns the kernel calls that make this certain on Linux: a *subreaper* inherits every orphan below it, so a descendant can
change its session or lose its parent and is still found; a *parent-death signal* ends a direct child whose parent was
killed; and a killed process is only gone once it is reaped. Knows nothing of engines or gateways.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02
_PROC = Path("/proc")


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; for use between fork and exec, hence no logging."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def oom_kills() -> int | None:
    """How many processes the kernel has killed for lack of memory since it started; None where it does not say."""
    try:
        counters = (_PROC / "vmstat").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill ")), None)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def descendants(root_pid: int, *, without: Collection[int] = ()) -> list[int]:
    """Every living process below `root_pid`, parents before children; the subtrees of `without` are left out."""
    children: dict[int, list[int]] = {}
    for pid, parent_pid in _living():
        children.setdefault(parent_pid, []).append(pid)
    found: list[int] = []
    waiting = [root_pid]
    while waiting:
        below = [pid for pid in children.get(waiting.pop(), []) if pid not in without]
        found += below
        waiting += below
    return found


def _living() -> Iterator[tuple[int, int]]:
    """(pid, parent pid) of every process that is not a zombie."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                # The command's name stands in parentheses and may itself contain any character.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    yield int(entry.name), int(fields[1])


def signal_all(pids: Collection[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap(without: Collection[int] = ()) -> None:
    """Collect the exit of children that have ended, except those that somebody else waits for."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in without:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def end_descendants(
    *,
    polite_s: float,
    limit_s: float,
    without: Collection[int] = (),
    sleep: Callable[[float], None] = time.sleep,
) -> list[int]:
    """End everything below this process: SIGTERM, after `polite_s` SIGKILL; returns what is left after `limit_s`.

    In the polite phase multiprocessing's resource trackers remove shared memory: they end after the processes that they
    serve. New forks of a dying process are caught because the search is repeated until it finds nothing.
    """
    started = time.monotonic()
    asked: set[int] = set()
    while left := descendants(os.getpid(), without=without):
        age_s = time.monotonic() - started
        if age_s >= limit_s:
            return left
        if age_s >= polite_s:
            signal_all(left, signal.SIGKILL)
        else:
            signal_all([pid for pid in left if pid not in asked], signal.SIGTERM)
            asked.update(left)
        reap(without)
        sleep(_POLL_S)
    reap(without)
    return []
