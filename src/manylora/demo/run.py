"""`manylora demo`: a small real model, five adapters, one endpoint; then a sixth, and a version forward and back.

Owns the order of things from an empty folder to the end: base model, registry, server, references, acts, clean-up.
Every answer is compared, token by token, with what transformers and PEFT give for that adapter on this machine; one
difference and the demo fails. The registry of a run lives in a temporary folder; only the base model is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from manylora.adapter import AdapterName
from manylora.demo import acts, asks, base_model, farewell, reference, transcript
from manylora.demo.asks import Check
from manylora.demo.client import Client
from manylora.demo.server import Server, ServerEnded
from manylora.demo.transcript import Transcript
from manylora.engine import launch
from manylora.errors import Conflict, NotFound, Unavailable
from manylora.registry.base_model import describe
from manylora.registry.catalog import Catalog
from manylora.settings import Settings
from manylora.supervisor.plan import free_port

HOST = "127.0.0.1"
PREFERRED_PORT = 8000
VLLM_FLAGS = (
    *("--max-model-len", "1024", "--max-num-seqs", "16", "--max-lora-rank", "16"),
    # Compiling the model takes longer than the whole demo, needs a C++ compiler, and gains nothing at this size.
    "--enforce-eager",
    # A step's time on a CPU grows with its tokens: prompts are read in small bites, so that streams keep their pace.
    *("--long-prefill-token-threshold", "5"),
)
REFERENCE_LIMIT_S = 600.0
_REFERENCE_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def run(
    *,
    keep: bool,
    home: Path,
    adapters: Path | None = None,
    vllm_flags: Sequence[str] = VLLM_FLAGS,
    console: Console | None = None,
) -> int:
    """Play the demo; 0 when every answer was right, 1 when one was not, 130 when it was interrupted.

    The base model is kept in `home`/models. With `keep` the server stays until Ctrl-C.
    """
    require_packages()
    out = Transcript(console or transcript.console())
    with tempfile.TemporaryDirectory(prefix="manylora-demo-", ignore_cleanup_errors=True) as folder:
        play = _Play(out, Path(folder), home / "models", adapters or find_adapters(), vllm_flags, keep)
        try:
            return asyncio.run(play.run())
        except ServerEnded as ended:
            raise _told(out, ended, Path(folder), home) from ended
        except (KeyboardInterrupt, asyncio.CancelledError):
            out.line("stopped")
            return 0 if play.kept else 130


def _told(out: Transcript, ended: ServerEnded, folder: Path, home: Path) -> Unavailable:
    """Show the server's last lines, and keep its logs, which lie in a folder that is about to be removed."""
    for line in ended.lines:
        out.line(f"  {line.strip()}")
    kept = home / "demo-logs"
    kept.mkdir(parents=True, exist_ok=True)
    for log in (folder / "serve.log", *(folder / "run").glob("*.log")):
        with contextlib.suppress(OSError):
            shutil.copy(log, kept / log.name)
    hint = ended.hint.replace(str(folder / "run"), str(kept))
    return Unavailable(ended.message, hint if str(kept) in hint else f"{hint}; its logs are kept in {kept}")


def require_packages() -> None:
    """Raise `Unavailable` for the first package that a plain install lacks, before anything is started."""
    launch.require_engine()
    for package in ("torch", "transformers", "peft", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise Unavailable(f"the demo needs the package {package}", "install manylora[cpu,demo], or use `make demo`")


def find_adapters() -> Path:
    """The adapters that come with manylora: inside the installed package, or in the source tree's examples."""
    package = Path(__file__).parent
    for folder in (package / "adapters", package.parents[2] / "examples" / "adapters"):
        if (folder / asks.ROLLED).is_dir():
            return folder
    raise NotFound("the demo's adapters are not installed", "run the demo from a checkout of manylora")


@dataclass(slots=True)
class _Play:
    out: Transcript
    home: Path
    models: Path
    adapters: Path
    vllm_flags: Sequence[str]
    keep: bool
    kept: bool = False

    async def run(self) -> int:
        with _cancelled_by_sigterm():
            settings = _settings(self.home)
            base = await self._base_model()
            with Catalog.open(settings) as catalog:
                key = await asyncio.to_thread(self._fill, catalog, base)
                async with self._serving(settings, base) as (server, check):
                    return await self._acts(catalog, server, check, key, _end_token(base))

    async def _base_model(self) -> Path:
        self.out.act("Preparation")
        started = time.monotonic()
        with self.out.waiting("unpacking the base model"):
            base = await asyncio.to_thread(base_model.ensure, self.models)
        took_s = time.monotonic() - started
        made = f"unpacked in {took_s:.0f} s" if took_s > 1 else "already unpacked"
        self.out.line(f"base model {base_model.NAME}, {made}: {base}")
        return base

    def _fill(self, catalog: Catalog, base: Path) -> str:
        """Register the base model, a tenant with a key, and the first five adapters; returns the key."""
        catalog.register_base_model(describe(base, name=base_model.NAME), actor=acts.ACTOR)
        catalog.create_tenant(asks.TENANT, actor=acts.ACTOR)
        key, _ = catalog.create_key(asks.TENANT, label="demo", actor=acts.ACTOR)
        for name in asks.FIRST_FIVE:
            started = time.monotonic()
            acts.publish(catalog, self.adapters / name, name)
            version = catalog.version(AdapterName(asks.TENANT, name), 1)
            self.out.line(
                f"pushed {version.ref}: rank {version.lora_rank}, {version.size_bytes / 1e6:.2f} MB, "
                f"{(time.monotonic() - started) * 1000:.0f} ms"
            )
        return key

    @contextlib.asynccontextmanager
    async def _serving(self, settings: Settings, base: Path) -> AsyncIterator[tuple[Server, Check]]:
        """The server, ready, and the check with its reference answers, computed while the server starts."""
        server = Server.start(settings, base, base_model.NAME, self.vllm_flags)
        references = asyncio.ensure_future(self._references(settings, base))
        try:
            with self.out.waiting("starting engine and gateway") as waiting:
                took_s = await server.wait_until_ready(waiting)
            self.out.line(f"engine and gateway ready after {took_s:.0f} s: {server.origin}/v1")
            with self.out.waiting("waiting for the reference answers of transformers + PEFT"):
                answers = await references
            self.out.line(f"transformers + PEFT gave {len(answers)} reference answers meanwhile")
            yield server, Check.of(answers)
        finally:
            references.cancel()
            await asyncio.gather(references, return_exceptions=True)
            await asyncio.to_thread(server.stop)

    async def _references(self, settings: Settings, base: Path) -> list[reference.ReferenceAnswer]:
        """Ask transformers and PEFT, in a process of their own."""
        file = self.home / "reference-asks.json"
        reference.write_asks(asks.reference_asks(self.adapters), base, file)
        with (self.home / "reference.log").open("w+b") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", reference.__name__, str(file)),
                env={**settings.child_env(), **_REFERENCE_ENV},
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
            try:
                output, _ = await asyncio.wait_for(process.communicate(), REFERENCE_LIMIT_S)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            if process.returncode != 0:
                log.seek(0)
                raise Unavailable(f"transformers + PEFT failed: {log.read().decode(errors='replace')[-2000:]}")
        return reference.read_answers(output)

    async def _acts(self, catalog: Catalog, server: Server, check: Check, key: str, end_token: int) -> int:
        async with Client(f"{server.origin}/v1", key) as client:
            stage = acts.Stage(catalog, client, self.adapters, check, end_token, self.out)
            for act in (acts.batch, acts.live_push, acts.roll):
                await act(stage)
            status = self._verdict(check)
            if self.keep and status == 0:
                farewell.show(self.out, f"{server.origin}/v1", key, self.home, await client.models())
                self.kept = True
                await server.wait()
        return status

    def _verdict(self, check: Check) -> int:
        self.out.act("Result")
        for difference in check.differences:
            self.out.failure(difference)
        right = check.compared - len(check.differences)
        self.out.line(f"{right} of {check.compared} answers have exactly the tokens of transformers + PEFT")
        return 1 if check.differences else 0


def _settings(home: Path) -> Settings:
    try:
        port = free_port(HOST, PREFERRED_PORT)
    except Conflict:
        port = free_port(HOST, 0)
    return Settings.from_env({"MANYLORA_HOME": str(home), "MANYLORA_HOST": HOST, "MANYLORA_PORT": str(port)})


def _end_token(base: Path) -> int:
    config = json.loads((base / "generation_config.json").read_text(encoding="utf-8"))
    return int(config["eos_token_id"])


@contextlib.contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does: the server is stopped and the temporary folder removed."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
