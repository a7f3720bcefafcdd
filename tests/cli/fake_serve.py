"""`manylora serve` with fake children instead of vLLM and the gateway: everything else is real."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from manylora.cli.main import app
from manylora.engine import launch
from manylora.settings import Settings
from manylora.supervisor import plan
from manylora.supervisor.child import ChildSpec
from manylora.supervisor.health import tcp_probe, unix_probe
from manylora.supervisor.machine import Plan
from manylora.supervisor.run_dir import RunDir

CHILD = Path(__file__).parents[1] / "supervisor" / "fake_child.py"


def fake_plan(settings: Settings, run_dir: RunDir, model: str, base_model: str, flags: list[str]) -> Plan:
    command = (sys.executable, str(CHILD), "--pids", str(run_dir.path / "pids"), *flags)
    return Plan(
        ChildSpec(
            name="engine",
            argv=(*command, "--socket", str(run_dir.engine_socket)),
            env=dict(os.environ),
            log=run_dir.log("engine"),
            probe=unix_probe(run_dir.engine_socket, "/health"),
            grace_s=1.0,
            socket=run_dir.engine_socket,
        ),
        ChildSpec(
            name="gateway",
            argv=(*command[:4], "--port", str(settings.port)),
            env=settings.child_env(),
            log=run_dir.log("gateway"),
            probe=tcp_probe(settings.host, settings.port, "/healthz"),
            grace_s=1.0,
        ),
        url=plan.public_url(settings.host, settings.port),
    )


if __name__ == "__main__":
    plan.make = fake_plan  # type: ignore[assignment]
    launch.require_engine = lambda: "0"
    app()
