"""The server's process: a death while it starts is told with its last lines, and stopping always ends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from manylora.demo import server
from manylora.demo.server import Server, ServerEnded
from manylora.settings import Settings

STUBBORN = (
    "import signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
)


def started(home: Path, code: str, port: int = 1) -> Server:
    settings = Settings.from_env({"MANYLORA_HOME": str(home), "MANYLORA_PORT": str(port)})
    log = home / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output, start_new_session=True)
    return Server(process, settings, log)


async def test_a_death_is_told_with_its_last_lines(tmp_path: Path) -> None:
    dying = started(tmp_path, "print('no such flag'); raise SystemExit(2)")
    with pytest.raises(ServerEnded, match="exit code 2") as caught:
        await dying.wait_until_ready(lambda elapsed_s, line: None)
    assert caught.value.lines == ["no such flag"]
    assert caught.value.hint == "the lines above are the last of its log"


async def test_an_error_and_its_hint_are_the_servers_own(tmp_path: Path) -> None:
    said = (
        "  INFO loading\n  ValueError: bad\nerror: the engine ended with exit code 1: ValueError: bad\nhint: do this\n"
    )
    dying = started(tmp_path, f"import sys; sys.stderr.write({said!r}); raise SystemExit(6)")
    with pytest.raises(ServerEnded) as caught:
        await dying.wait_until_ready(lambda elapsed_s, line: None)
    assert caught.value.message == (
        "manylora serve ended with exit code 6: the engine ended with exit code 1: ValueError: bad"
    )
    assert caught.value.hint == "do this"
    assert caught.value.lines == ["  INFO loading", "  ValueError: bad"]


async def test_a_killed_server_is_told_as_such(tmp_path: Path) -> None:
    killed = started(tmp_path, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ServerEnded, match="ended with signal 9"):
        await killed.wait_until_ready(lambda elapsed_s, line: None)


async def test_ready_when_the_gateway_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_POLL_S", 0.01)
    answers = iter([503, 503, 200])
    heard: list[float] = []

    async def readyz(request: web.Request) -> web.Response:
        return web.Response(status=next(answers))

    app = web.Application()
    app.router.add_get("/readyz", readyz)
    async with TestServer(app) as gateway:
        running = started(tmp_path, "import time; time.sleep(60)", gateway.port or 0)
        try:
            took_s = await running.wait_until_ready(lambda elapsed_s, line: heard.append(elapsed_s))
        finally:
            running.stop()
    assert took_s > 0 and len(heard) == 2
    assert running.process.poll() is not None


def test_a_stubborn_server_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_LIMIT_S", 0.2)
    stubborn = started(tmp_path, STUBBORN)
    while not stubborn.log.read_bytes():
        pass
    stubborn.stop()
    assert stubborn.process.returncode == -9
    stubborn.stop()  # again: nothing happens
