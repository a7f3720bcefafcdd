"""What the tests read from /proc: who descends from whom, what each is, how much memory it holds, where it listens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
GATEWAY = "gateway"
API_SERVER = "api-server"
ENGINE_CORE = "engine-core"
WORKER = "worker"
AGENT = "agent"
GUARD = "guard"
# A guard's command line repeats that of the child it watches, so it comes first.
_MARKS = (
    (GUARD, "manylora.supervisor.guard"),
    (GATEWAY, "manylora.gateway"),
    (AGENT, "manylora.agent"),
    (API_SERVER, "vllm.entrypoints"),
    (API_SERVER, "VLLM::APIServer"),
    (ENGINE_CORE, "EngineCore"),
    (WORKER, "VLLM::Worker"),
)


@dataclass(frozen=True, slots=True)
class Process:
    """A live process. `role` is empty for what has no role in serving (a tracker, a compiler)."""

    pid: int
    parent: int
    role: str
    command: str


def descendants(root: int) -> list[Process]:
    """Every live process below `root`, itself not included."""
    everyone = list(_everyone())
    found, frontier = [], {root}
    while frontier:
        children = [process for process in everyone if process.parent in frontier]
        found += children
        frontier = {process.pid for process in children}
    return found


def marked(variable: bytes) -> list[int]:
    """Every live process whose environment holds `variable` (``NAME=value``): it outlives parents that die."""
    return [process.pid for process in _everyone() if variable in _read(process.pid, "environ").split(b"\0")]


def alive(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that still run; zombies do not."""
    running = {process.pid for process in _everyone()}
    return [pid for pid in pids if pid in running]


def wait_gone(pids: Iterable[int], limit_s: float) -> list[int]:
    """Wait until none of `pids` runs; whoever is left at the limit."""
    deadline = time.monotonic() + limit_s
    left = alive(pids)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = alive(left)
    return left


def kill_hard(pids: Iterable[int]) -> None:
    """SIGKILL each of `pids` that still exists."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def resident_bytes(pids: Iterable[int]) -> int:
    """Memory that these processes hold: the sum of proportional set sizes, so shared pages count once.

    Without shared memory: the agent's is bounded by its budget, whoever reads in it.
    """
    total = 0
    for pid in pids:
        for line in _read(pid, "smaps_rollup").splitlines():
            sign = {b"Pss:": 1, b"Pss_Shmem:": -1}.get(line.split()[0], 0) if line else 0
            total += sign * int(line.split()[1]) * 1024 if sign else 0
    return total


def busy_share(seconds: float) -> float:
    """How much of the machine's processor time is in use over the next `seconds`, by whomever: 0 to 1."""
    before = _processor_ticks()
    time.sleep(seconds)
    busy, total = (after - start for after, start in zip(_processor_ticks(), before, strict=True))
    return busy / max(total, 1)


def _processor_ticks() -> tuple[int, int]:
    ticks = [int(field) for field in (PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def listening_addresses(pids: Iterable[int]) -> list[str]:
    """IPv4 and IPv6 addresses (as the kernel writes them, hex) on which these processes accept TCP connections."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in (PROC / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1])
    return found


def is_loopback(address: str) -> bool:
    """Whether an address of `listening_addresses` is reachable from this machine only."""
    host = address.partition(":")[0]
    return host == "0100007F" or host in ("0" * 24 + "01000000", "0000000000000000FFFF00000100007F")


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    try:
        for entry in (PROC / str(pid) / "fd").iterdir():
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        return found
    return found


def _everyone() -> Iterable[Process]:
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        stat = _read(pid, "stat")
        if not stat:
            continue
        state, parent = stat.rpartition(b")")[2].split()[:2]
        if state in (b"Z", b"X"):
            continue
        command = _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")
        role = next((role for role, mark in _MARKS if mark in command), "")
        yield Process(pid, int(parent), role, command)


def _read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
