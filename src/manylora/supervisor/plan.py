"""From settings and flags to the children of a machine."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from manylora.engine import launch
from manylora.errors import Conflict, InvalidSettings
from manylora.settings import Settings
from manylora.supervisor.child import ChildSpec
from manylora.supervisor.health import tcp_probe, unix_probe
from manylora.supervisor.machine import Plan
from manylora.supervisor.run_dir import RunDir

GATEWAY_GRACE_S = 2.5
ENGINE_GRACE_S = 4.0
AGENT_GRACE_S = 1.0
_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104


def make(settings: Settings, run_dir: RunDir, model: str, base_model: str, flags: Sequence[str]) -> Plan:
    """Plan a machine that serves `model` as `base_model`; raise `InvalidSettings` for flags that cannot be passed."""
    return Plan(
        engine=_engine(settings, run_dir, model, base_model, flags),
        gateway=_gateway(settings, run_dir, base_model),
        agent=_agent(settings, run_dir),
        url=public_url(settings.host, settings.port),
    )


def public_url(host: str, port: int) -> str:
    """The base URL for an OpenAI client on this machine."""
    name = "127.0.0.1" if host in _WILDCARDS else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/v1"


def free_port(host: str, port: int) -> int:
    """`port` if the gateway can listen there, or any free one for 0; raises `Conflict` when it is taken."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidSettings(f"--host {host} cannot be used: {error.strerror}", "give an address or name") from error
    with socket.socket(family, kind, proto) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise Conflict(
                f"cannot listen on {host}:{port}: {error.strerror}", "give another --port, or stop what listens there"
            ) from error
        chosen: int = listener.getsockname()[1]
        return chosen


def _engine(settings: Settings, run_dir: RunDir, model: str, base_model: str, flags: Sequence[str]) -> ChildSpec:
    command = launch.command(
        model,
        socket=run_dir.engine_socket,
        disk_tier=settings.disk_tier,
        served_model_name=base_model,
        adapter_memory=settings.adapter_memory,
        agent_socket=run_dir.agent_socket,
        vllm_args=flags,
        env=settings.child_env(),
    )
    return ChildSpec(
        name="engine",
        argv=command.argv,
        env=command.env,
        log=run_dir.log("engine"),
        probe=unix_probe(run_dir.engine_socket, "/health"),
        grace_s=ENGINE_GRACE_S,
        socket=run_dir.engine_socket,
    )


def _agent(settings: Settings, run_dir: RunDir) -> ChildSpec:
    flags = ("--socket", str(run_dir.agent_socket), "--http-socket", str(run_dir.agent_http_socket), "--own-session")
    return ChildSpec(
        name="agent",
        argv=(sys.executable, "-P", "-m", "manylora.agent", *flags),
        env=settings.child_env(),
        log=run_dir.log("agent"),
        probe=unix_probe(run_dir.agent_http_socket, "/healthz"),
        grace_s=AGENT_GRACE_S,
        socket=run_dir.agent_socket,
    )


def _gateway(settings: Settings, run_dir: RunDir, base_model: str) -> ChildSpec:
    flags = ("--engine-socket", str(run_dir.engine_socket), "--base-model", base_model)
    return ChildSpec(
        name="gateway",
        argv=(sys.executable, "-P", "-m", "manylora.gateway", *flags),
        env=settings.child_env(),
        log=run_dir.log("gateway"),
        probe=tcp_probe(settings.host, settings.port, "/healthz"),
        grace_s=GATEWAY_GRACE_S,
    )
