"""`manylora serve` as a child of the demo, started, waited for and stopped: the command that a person would use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from manylora.errors import Unavailable
from manylora.settings import Settings
from manylora.supervisor import child_log, process_tree

START_LIMIT_S = 900.0
STOP_LIMIT_S = 15.0
_POLL_S = 0.5
_TAIL_LINES = 24
_ERROR, _HINT = "error: ", "hint: "


class ServerEnded(Unavailable):
    """`manylora serve` ended by itself; `lines` are the last that it wrote, without its error and hint."""

    def __init__(self, message: str, hint: str, lines: Sequence[str]) -> None:
        super().__init__(message, hint)
        self.lines = lines


@dataclass(frozen=True, slots=True)
class Server:
    """A running `manylora serve`; its own output is in `log`, the engine's in the run folder."""

    process: subprocess.Popen[bytes]
    settings: Settings
    log: Path

    @classmethod
    def start(cls, settings: Settings, model: Path, name: str, vllm_flags: Sequence[str]) -> Server:
        """Start serving `model` as `name`, in a session of its own: Ctrl-C at the terminal is the demo's to handle."""
        argv = [sys.executable, "-P", "-m", "manylora", "serve", str(model), "--served-model-name", name]
        argv += ["--host", settings.host, "--port", str(settings.port), "--", *vllm_flags]
        log = settings.home / "serve.log"
        demo_pid = os.getpid()
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - the command is this program's own
                argv,
                env=settings.child_env(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: process_tree.die_with_parent(demo_pid),
            )
        return cls(process, settings, log)

    @property
    def origin(self) -> str:
        return f"http://{self.settings.host}:{self.settings.port}"

    @property
    def engine_log(self) -> Path:
        return self.settings.run_dir / "engine.log"

    async def wait_until_ready(self, waiting: Callable[[float, str], None]) -> float:
        """Wait for engine and gateway; `waiting` hears the seconds so far and the engine's last line of log."""
        started = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while not await _is_ready(session, f"{self.origin}/readyz"):
                elapsed_s = time.monotonic() - started
                self._check_alive(elapsed_s)
                waiting(elapsed_s, child_log.last_meaningful_line(self.engine_log))
                await asyncio.sleep(_POLL_S)
        return time.monotonic() - started

    def _check_alive(self, elapsed_s: float) -> None:
        if self.process.poll() is not None:
            raise self._ended(self.process.returncode)
        if elapsed_s > START_LIMIT_S:
            raise Unavailable(f"the engine was not ready after {START_LIMIT_S:.0f} s", f"its log is {self.engine_log}")

    async def wait(self) -> None:
        """Until it ends by itself, which it should not."""
        status = await asyncio.to_thread(self.process.wait)
        raise self._ended(status)

    def _ended(self, status: int) -> ServerEnded:
        """Why it ended, in its own words where it said so."""
        lines = child_log.tail(self.log, lines=_TAIL_LINES)
        errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
        hints = [line.removeprefix(_HINT) for line in lines if line.startswith(_HINT)]
        how = f"exit code {status}" if status >= 0 else f"signal {-status}"
        return ServerEnded(
            f"manylora serve ended with {how}" + (f": {errors[-1]}" if errors else ""),
            hints[-1] if hints else "the lines above are the last of its log",
            [line for line in lines if not line.startswith((_ERROR, _HINT))],
        )

    def stop(self) -> None:
        """Stop it as Ctrl-C would; by force where that takes too long."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
