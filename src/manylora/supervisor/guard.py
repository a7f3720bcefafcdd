"""The guard: a tiny process between the supervisor and one of its children, and the child's last undertaker.

    python -P -m manylora.supervisor.guard LIFELINE_FD LOCK_FD GRACE_S -- COMMAND…

It runs the command in a session of its own and ends when the command has ended *and* nothing that the command ever
started is left (a vLLM whose API server was killed leaves its engine core and workers). The lifeline is a pipe whose
other end only the supervisor holds: `STOP` and `KILL` are its two orders, and end of file means that the supervisor is
gone, however it went. The lock's file descriptor is held open so that a new supervisor waits until this one's processes
are gone. Exit status: the command's, or 128 + the signal that ended it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from manylora.supervisor import process_tree

STOP = b"s"
KILL = b"k"
NOT_FOUND_STATUS = 127
SIGNAL_STATUS = 128
ORPHAN_GRACE_S = 3.0
"""How long the command may take to end after the supervisor has vanished."""
LEFTOVER_POLITE_S = 1.0
_LEFTOVER_LIMIT_S = 5.0


class Guard:
    """One command, from its start to the last of its descendants."""

    def __init__(self, command: Sequence[str], lifeline_fd: int, grace_s: float) -> None:
        self._lifeline_fd = lifeline_fd
        self._grace_s = grace_s
        self._kill_at_s: float | None = None
        self._polite_s = LEFTOVER_POLITE_S
        self._wakeup_fd, write_fd = os.pipe()
        for fd in (self._wakeup_fd, write_fd):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        guard_pid = os.getpid()
        # This process has one thread, so code between fork and exec is safe.
        self._child = subprocess.Popen(  # noqa: S603 - the command is the supervisor's
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: process_tree.die_with_parent(guard_pid),
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._stop(self._grace_s))

    def run(self) -> int:
        """Serve orders until the command ends, then clear what it left."""
        while self._child.poll() is None:
            self._wait()
            if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                self._child.kill()
                self._child.wait()
            process_tree.reap(without=[self._child.pid])
        process_tree.end_descendants(polite_s=self._polite_s, limit_s=_LEFTOVER_LIMIT_S)
        status = self._child.returncode
        return status if status >= 0 else SIGNAL_STATUS - status

    def _wait(self) -> None:
        """Sleep until a child ends, an order comes, or the grace is over."""
        timeout_s = None if self._kill_at_s is None else max(self._kill_at_s - time.monotonic(), 0.0)
        watched = [self._wakeup_fd] if self._lifeline_fd < 0 else [self._wakeup_fd, self._lifeline_fd]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if self._wakeup_fd in ready:
            os.read(self._wakeup_fd, 4096)
        if self._lifeline_fd in ready:
            self._obey(os.read(self._lifeline_fd, 64))

    def _obey(self, orders: bytes) -> None:
        if not orders:
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1
            self._stop(min(self._grace_s, ORPHAN_GRACE_S))
        elif KILL in orders:
            self._kill_at_s, self._polite_s = time.monotonic(), 0.0
        else:
            self._stop(self._grace_s)

    def _stop(self, grace_s: float) -> None:
        """Ask the command to end; a second request never prolongs the first."""
        deadline_s = time.monotonic() + grace_s
        self._kill_at_s = deadline_s if self._kill_at_s is None else min(self._kill_at_s, deadline_s)
        self._child.terminate()


def main(argv: Sequence[str]) -> int:
    """Run the guard with the command line of the module's docstring."""
    lifeline_fd, lock_fd, grace_s = int(argv[0]), int(argv[1]), float(argv[2])
    for fd in (lifeline_fd, lock_fd):
        os.set_inheritable(fd, False)
    process_tree.adopt_orphans()
    try:
        guard = Guard(argv[4:], lifeline_fd, grace_s)
    except OSError as error:
        print(f"cannot start {argv[4]}: {error.strerror}", file=sys.stderr, flush=True)
        return NOT_FOUND_STATUS
    return guard.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
