"""A supervisor over fake children, run as a process of its own: events go to stdout as JSON lines.

fake_machine.py FOLDER PORT 'engine flags' 'gateway flags'
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from manylora.errors import ManyloraError
from manylora.supervisor import keeper, machine, run_dir
from manylora.supervisor.child import ChildSpec
from manylora.supervisor.health import tcp_probe, unix_probe
from manylora.supervisor.restart import RestartPolicy

CHILD = Path(__file__).with_name("fake_child.py")


def say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


class Printer:
    def waiting(self, elapsed_s: float, engine_line: str) -> None:
        say("waiting", line=engine_line)

    def ready(self, url: str, took_s: float) -> None:
        say("ready", url=url)

    def died(self, child: str, how: str, retry_in_s: float) -> None:
        say("died", child=child, how=how, retry_in_s=retry_in_s)

    def back(self, child: str) -> None:
        say("back", child=child)

    def hanging(self, child: str) -> None:
        say("hanging", child=child)

    def stopping(self) -> None:
        say("stopping")


def spec(owned: run_dir.RunDir, name: str, flags: str, port: int) -> ChildSpec:
    is_engine = name == "engine"
    where = ["--socket", str(owned.engine_socket)] if is_engine else ["--port", str(port)]
    return ChildSpec(
        name=name,
        argv=(sys.executable, str(CHILD), "--pids", str(owned.path / f"{name}.pids"), *where, *shlex.split(flags)),
        env=dict(os.environ),
        log=owned.log(name),
        probe=unix_probe(owned.engine_socket, "/health") if is_engine else tcp_probe("127.0.0.1", port, "/healthz"),
        grace_s=float(os.environ.get("GRACE_S", "1")),
        socket=owned.engine_socket if is_engine else None,
    )


def main(folder: str, port: str, engine_flags: str, gateway_flags: str) -> int:
    machine.STOP_LIMIT_S = float(os.environ.get("STOP_LIMIT_S", "9"))
    keeper.PROBE_STARTING_S, keeper.PROBE_HEALTHY_S, keeper.SILENT_LIMIT_S = 0.05, 0.1, 0.5
    try:
        with run_dir.owned(Path(folder)) as owned:
            plan = machine.Plan(
                engine=spec(owned, "engine", engine_flags, int(port)),
                gateway=spec(owned, "gateway", gateway_flags, int(port)),
                url="http://here",
                restart=RestartPolicy(first_delay_s=0.1, max_delay_s=0.4),
            )
            return machine.run(plan, Printer(), owned.lock_fd)
    except ManyloraError as error:
        say("failed", message=error.message, hint=error.hint, lines=getattr(error, "lines", []))
        return 6


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
