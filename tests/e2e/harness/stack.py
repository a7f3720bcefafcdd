"""`manylora serve` as a user starts it: a subprocess on a home of its own, with keys, registry and processes at hand.

One vLLM runs at a time: `StackHolder` starts it when a test first asks, and again after a test stopped it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from harness import processes, recipes
from harness.processes import Process
from harness.zoo import Zoo
from manylora.adapter import AdapterName
from manylora.errors import Conflict
from manylora.registry.catalog import Catalog
from manylora.registry.records import Published
from manylora.settings import Settings

TENANT = "acme"
RIVAL = "rival"
ACTOR = "tests"
START_LIMIT_S = 600.0
STOP_LIMIT_S = 10.0
MAX_LORAS = 4
MAX_CPU_LORAS = 8
BODY_LIMIT_BYTES = 1024 * 1024
VLLM_ARGS = (
    "--max-model-len", str(recipes.MAX_POSITION), "--max-num-seqs", "16", "--enforce-eager",
    "--max-loras", str(MAX_LORAS), "--max-cpu-loras", str(MAX_CPU_LORAS),
)  # fmt: skip
_POLL_S = 0.2


@dataclass
class Stack:
    """One home and whatever runs on it now. Publishing here writes to the registry as `manylora adapter push` does."""

    zoo: Zoo
    home: Path
    port: int
    env: dict[str, str]
    settings: Settings
    catalog: Catalog
    keys: dict[str, str]
    vllm_args: tuple[str, ...] = ()
    """Flags for vLLM after the usual ones, so that these win."""
    server: subprocess.Popen[bytes] | None = None
    starts: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        """The API key of the tenant that owns the zoo's adapters."""
        return self.keys[TENANT]

    # The processes

    def start(self, *, wait: bool = True) -> None:
        """Start the stack; return once it is ready to serve."""
        began = time.monotonic()
        serve = ["serve", str(self.zoo.base_path), "--port", str(self.port), "--served-model-name", recipes.BASE_NAME]
        with (self.home / "serve.log").open("ab") as log:
            self.server = subprocess.Popen(
                [*cli_argv(), *serve, "--", *VLLM_ARGS, *self.vllm_args],
                env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        if wait:
            try:
                self.wait_ready()
            except AssertionError:
                self.stop()  # the next test must not find a stack that is half there
                raise
            self.starts.append(time.monotonic() - began)

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> float:
        """Wait until requests are served; how long that took."""
        began = time.monotonic()
        while not self.is_ready():
            assert self.server is not None
            assert self.server.poll() is None, f"`manylora serve` ended: {self.server.returncode}\n{self.log_tail()}"
            assert time.monotonic() - began < limit_s, f"not ready after {limit_s:.0f} s\n{self.log_tail()}"
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def is_running(self) -> bool:
        return self.server is not None and self.server.poll() is None

    def stop(self, limit_s: float = STOP_LIMIT_S) -> float:
        """Ctrl-C; how long until the last process was gone. Fails, and kills, where one is left after the limit."""
        assert self.server is not None
        everyone = self.everyone()
        began = time.monotonic()
        self.server.send_signal(signal.SIGINT)
        left = processes.wait_gone([*everyone, self.server.pid], limit_s)
        took = time.monotonic() - began
        processes.kill_hard({*left, *self.everyone()})
        self.server.wait()
        assert not left, f"{len(left)} processes were left {limit_s:.0f} s after Ctrl-C\n{self.log_tail()}"
        return took

    def end(self) -> None:
        """Leave nothing: no process, no folder. Never fails for what it finds."""
        processes.kill_hard(self.everyone())
        if self.server is not None:
            self.server.kill()
            self.server.wait()
        self.catalog.close()
        if not os.environ.get("MANYLORA_TEST_KEEP_HOME"):
            shutil.rmtree(self.home, ignore_errors=True)

    def everyone(self) -> list[int]:
        """Every process started for this home: descendants, and orphans by the environment they inherited."""
        # A process that rewrites its title may lose the environment that /proc shows, so neither way alone is enough.
        below = [process.pid for process in processes.descendants(self.server.pid)] if self.server else []
        return sorted({*below, *processes.marked(f"MANYLORA_HOME={self.home}".encode())} - {os.getpid()})

    def by_role(self, role: str) -> list[Process]:
        assert self.server is not None
        return [process for process in processes.descendants(self.server.pid) if process.role == role]

    def engine_pids(self) -> list[int]:
        """The API server, the engine core and its workers, sorted: the same list later means that nothing restarted."""
        roles = (processes.API_SERVER, processes.ENGINE_CORE, processes.WORKER)
        return sorted(process.pid for role in roles for process in self.by_role(role))

    def gateway_pid(self) -> int:
        [gateway] = self.by_role(processes.GATEWAY)
        return gateway.pid

    def log_tail(self, lines: int = 60) -> str:
        """The end of every log of this home."""
        logs = [self.home / "serve.log", *sorted(self.settings.run_dir.glob("*.log"))]
        return "\n".join(f"--- {log.name}\n" + _tail(log, lines) for log in logs if log.exists())

    # The registry

    def publish(
        self, recipe: str, name: str | None = None, *, tenant: str = TENANT, promote: bool | None = True
    ) -> Published:
        """Push the zoo's adapter `recipe` as `tenant/name`; a first version becomes live unless `promote` is false."""
        return self.publish_folder(self.zoo.adapter(recipe), f"{tenant}/{name or recipe}", promote=promote)

    def publish_folder(self, folder: Path, name: str, *, promote: bool | None = True) -> Published:
        adapter = AdapterName.parse(name)
        return self.catalog.publish(folder, adapter, base_model=recipes.BASE_NAME, actor=ACTOR, promote=promote)

    def cli(self, *args: str, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a `manylora` command on this home to its end."""
        return subprocess.run(
            [*cli_argv(), *args], env=self.env, capture_output=True, text=True, timeout=limit_s, check=False
        )

    # The engine behind the gateway

    def engine_client(self) -> httpx.Client:
        """A client of the engine's own socket, as nobody outside has."""
        transport = httpx.HTTPTransport(uds=str(self.settings.run_dir / "engine.sock"))
        return httpx.Client(transport=transport, base_url="http://engine", timeout=60)

    def residency(self) -> list[dict[str, object]]:
        """Which adapters the engine holds in memory now."""
        with self.engine_client() as client:
            found: list[dict[str, object]] = client.get("/manylora/v1/residency").raise_for_status().json()["adapters"]
            return found

    def engine_metric(self, name: str) -> float:
        """The sum of all samples of one of the engine's metrics."""
        with self.engine_client() as client:
            lines = client.get("/metrics").raise_for_status().text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        assert values, f"the engine has no metric {name}"
        return sum(map(float, values))


@dataclass
class StackHolder:
    """The session's stack, running whenever a test asks for it."""

    zoo: Zoo
    _stack: Stack | None = None

    def running(self) -> Stack:
        if self._stack is None:
            self._stack = create_stack(self.zoo)
        if not self._stack.is_running():
            self._stack.start()
        return self._stack

    def stopped(self) -> Stack:
        """The stack with nothing running on its home."""
        if self._stack is None:
            self._stack = create_stack(self.zoo)
        if self._stack.is_running():
            self._stack.stop()
        return self._stack

    def end(self) -> None:
        if self._stack is not None:
            self._stack.end()


def create_stack(zoo: Zoo, *vllm_args: str) -> Stack:
    """A fresh home with the tenants and keys of the tests; nothing runs yet."""
    # A Unix socket's path has at most 107 bytes, so the home is not under pytest's long temporary folders.
    home = Path(tempfile.mkdtemp(prefix="ml-"))
    roots = home / "roots"
    roots.mkdir()
    own = {
        "MANYLORA_HOME": str(home),
        "MANYLORA_ADAPTER_ROOTS": str(roots),
        "MANYLORA_MAX_BODY_BYTES": str(BODY_LIMIT_BYTES),
    }
    catalog = Catalog.open(Settings.from_env(own))
    keys = {tenant: _tenant(catalog, tenant) for tenant in (TENANT, RIVAL)}
    keys["admin"] = catalog.create_key(TENANT, label="admin", is_admin=True, actor=ACTOR)[0]
    port = _free_port()
    return Stack(zoo, home, port, _child_env(own), Settings.from_env(own), catalog, keys, vllm_args)


def cli_argv() -> list[str]:
    return [sys.executable, "-c", "import sys; from manylora.__main__ import main; sys.exit(main())"]


def _tenant(catalog: Catalog, tenant: str) -> str:
    with contextlib.suppress(Conflict):  # it may be there from the start
        catalog.create_tenant(tenant, actor=ACTOR)
    return catalog.create_key(tenant, label="tests", actor=ACTOR)[0]


def _child_env(own: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MANYLORA_", "PYTEST_"))}
    fixed = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }
    return {**inherited, **fixed, **own}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(log: Path, lines: int) -> str:
    text: Sequence[str] = log.read_text(errors="replace").splitlines()
    return "\n".join(text[-lines:])
