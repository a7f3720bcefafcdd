"""Running at a lower priority than whoever serves on this machine.

A nice value is not enough. Where Linux groups processes by session (sched_autogroup), each session gets an equal share
of a core, whatever nice values its processes have: a push from one terminal halves the speed of an engine in another as
long as both are on one core. So the command goes on in a session of its own, whose group is nice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType

NICE = 5
"""Streams of an engine on the same few cores go first, and a push still ends within a second or two."""

_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_ENABLED = Path("/proc/sys/kernel/sched_autogroup_enabled")
_RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


def give_way() -> None:
    """Lower this process's priority to `NICE`, if it is higher.

    Where sessions are scheduled as groups this returns in a child process with its own session. The caller's process
    stays, relays signals both ways, and ends as the child does; if it is killed, the child is.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    if not _sessions_are_groups():
        return
    parent = os.getpid()
    child = os.fork()
    if child != 0:
        _end_like(child)
    _die_with(parent)
    os.setsid()
    with contextlib.suppress(OSError):  # an unprivileged process may do it ten times a second only
        _AUTOGROUP.write_text(str(NICE))


def _sessions_are_groups() -> bool:
    try:
        return _AUTOGROUP_ENABLED.read_text().strip() == "1" and _AUTOGROUP.exists()
    except OSError:
        return False


def _end_like(child: int) -> None:
    """Wait for `child`, passing signals on to it, and end with its exit status or by its signal. Never returns."""

    def relay(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _RELAYED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, relay)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        if -status in _RELAYED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before we asked
        sys.exit(128 + signal.SIGKILL)
