"""`manylora agent`: the node's agent by itself, for engines that something else starts."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from manylora.cli.session import session_of


def agent(
    ctx: typer.Context,
    socket: Annotated[
        Path | None,
        typer.Option("--socket", metavar="PATH", help="Where engines' workers ask [default: agent.sock, run folder]."),
    ] = None,
    http_socket: Annotated[
        Path | None,
        typer.Option(
            "--http-socket", metavar="PATH", help="Where /healthz and /metrics are [default: agent-http.sock, there]."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option("--host-memory", metavar="SIZE", help="Host memory for adapters [default: 10% of the machine's]."),
    ] = None,
    disk_budget: Annotated[
        str | None, typer.Option("--disk-budget", metavar="SIZE", help="Disk for adapters [default: 100GiB].")
    ] = None,
) -> None:
    """Pack adapters for the engines of this node, and keep them ready in shared memory, until Ctrl-C.

    `manylora serve` starts one by itself. Engines that are started otherwise find it by
    MANYLORA_ENGINE_AGENT_SOCKET.
    """
    settings = session_of(ctx).settings()
    settings = replace(
        settings,
        host_memory=host_memory or settings.host_memory,
        disk_budget=disk_budget or settings.disk_budget,
    )
    settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    sockets = ["--socket", str(socket or settings.run_dir / "agent.sock")]
    sockets += ["--http-socket", str(http_socket or settings.run_dir / "agent-http.sock")]
    command = (sys.executable, "-P", "-m", "manylora.agent", *sockets)
    sys.stdout.flush()
    os.execve(command[0], command, settings.child_env())  # noqa: S606 - this program's own command
