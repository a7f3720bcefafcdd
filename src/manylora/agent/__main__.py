"""`python -m manylora.agent`: the node's agent. Owns its command line and the order of starting and stopping.

Exit codes: 0 after a clean stop, 1 when it cannot start, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from manylora.agent.arena import PAGE_BYTES
from manylora.errors import InvalidSettings, ManyloraError
from manylora.settings import MemorySize, Settings
from manylora.telemetry import configure_logging

log = logging.getLogger("manylora.agent")

NICE = 5
"""Packing gives way to engines on the same cores."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags; everything else comes from `Settings`."""
    parser = argparse.ArgumentParser(prog="python -m manylora.agent", description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket on which engines' workers ask")
    parser.add_argument("--http-socket", type=Path, required=True, help="Unix socket of /healthz and /metrics")
    parser.add_argument("--own-session", action="store_true", help="this session holds nothing but the agent")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT; the exit code is the process's."""
    args = parse_args(argv)
    try:
        settings = Settings.from_env()
        host_bytes, disk_bytes = budgets(settings)
    except InvalidSettings as error:
        print(f"manylora agent: {error}", file=sys.stderr)
        return 2
    configure_logging("agent")
    give_way(own_session=args.own_session)
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        _serve(settings, host_bytes, disk_bytes, args.socket, args.http_socket)
    except ModuleNotFoundError as error:
        log.error(
            "%s is not installed: the agent needs an engine's packages (manylora[gpu] or manylora[cpu])", error.name
        )
        return 1
    except (ManyloraError, OSError) as error:
        log.error("%s", error)
        return 1
    return 0


_ENDS = (signal.SIGTERM, signal.SIGINT)


def budgets(settings: Settings) -> tuple[int, int]:
    """Bytes of host memory and of disk. Raises `InvalidSettings` for a size that cannot be read."""
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host = MemorySize.parse(settings.host_memory, "host memory").of(total_bytes)
    if host < PAGE_BYTES:
        raise InvalidSettings(f"host memory of {settings.host_memory!r} holds no adapter", "give some GiB")
    disk = MemorySize.parse(settings.disk_budget, "a disk budget")
    place = next(path for path in (settings.disk_tier, *settings.disk_tier.parents) if path.exists())
    return host, disk.of(shutil.disk_usage(place).total)


def give_way(*, own_session: bool) -> None:
    """Lower the priority; with a session of its own also the session's, where Linux schedules sessions as groups."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    group = Path("/proc/self/autogroup")
    if own_session and group.exists():
        try:
            group.write_text(str(NICE))
        except OSError as error:
            log.info("the agent's session keeps its priority: %s", error)


def _serve(settings: Settings, host_bytes: int, disk_bytes: int, socket: Path, http_socket: Path) -> None:
    # Imported late: PyTorch takes seconds, and wrong usage is to be told at once.
    import torch
    from prometheus_client import CollectorRegistry

    from manylora.agent.arena import Arena
    from manylora.agent.disk_budget import DiskBudget
    from manylora.agent.http import HttpServer
    from manylora.agent.metrics import AgentMetrics
    from manylora.agent.packed_files import PackedFiles
    from manylora.agent.server import AgentServer
    from manylora.agent.stager import Stager
    from manylora.tiers.disk import DiskTier

    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 4))
    disk, files = DiskTier(settings.disk_tier), PackedFiles(settings.disk_tier / PACKED_FOLDER)
    files.sweep_partial()
    metrics = AgentMetrics(CollectorRegistry())
    stager = Stager(disk, files, Arena(host_bytes), metrics.staged)
    budget = DiskBudget(disk, files, disk_bytes)
    metrics.watch(stager, budget)
    server, http = AgentServer(socket, stager), HttpServer(http_socket, metrics, stager)
    server.start()
    http.start()
    budget.start()
    log.info("the agent is ready: %d MiB of host memory", host_bytes >> 20)
    signal.sigwait(_ENDS)
    budget.stop()
    server.close()
    stager.close()


PACKED_FOLDER = ".packed"
"""In the disk tier, beside the adapters' own folders."""


if __name__ == "__main__":
    sys.exit(main())
