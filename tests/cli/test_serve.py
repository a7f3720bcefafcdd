"""`manylora serve`: arguments, what it prepares in the registry, what it prints, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manylora.cli import serve_screen
from manylora.cli.serve_screen import ServeScreen

Cli = Callable[..., Any]
SERVE = Path(__file__).with_name("fake_serve.py")


@pytest.mark.parametrize(
    "flag", ["--uds", "--host=0.0.0.0", "--port", "--api-key", "--lora-modules", "--served-model-name", "--config"]
)
def test_vllm_flags_that_cannot_be_passed(cli: Cli, base_folder: Path, flag: str) -> None:
    outcome = cli("serve", base_folder, "--", flag, "x")
    assert outcome.code == 3
    error, hint = outcome.err.splitlines()
    assert flag.partition("=")[0] in error
    assert hint.startswith("hint: ")


def test_vllm_flags_belong_after_the_dashes(cli: Cli, base_folder: Path) -> None:
    outcome = cli("serve", base_folder, "--max-loras", "4")
    assert outcome.code == 2
    assert "manylora serve MODEL -- --max-loras" in outcome.err


def test_only_flags_may_follow(cli: Cli, base_folder: Path) -> None:
    assert "unexpected argument 'extra'" in cli("serve", base_folder, "extra").err


@pytest.mark.parametrize("model", ["/no/such/folder", "./nor-this", "~/nor/that"])
def test_a_folder_that_is_not_there(cli: Cli, model: str) -> None:
    outcome = cli("serve", model)
    assert outcome.code == 4
    assert "config.json" in outcome.err


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_is_a_port(cli: Cli, port: str) -> None:
    assert cli("serve", "model", "--port", port).code == 2


@pytest.mark.parametrize("size", ["95%", "8GB", "much"])
def test_adapter_memory_that_cannot_be_used(cli: Cli, base_folder: Path, size: str) -> None:
    outcome = cli("serve", base_folder, "--adapter-memory", size)
    assert outcome.code == 3
    error, hint = outcome.err.splitlines()[-2:]
    assert repr(size) in error
    assert "8GiB" in hint


class Served:
    """A running `manylora serve` over fake children."""

    def __init__(self, home: Path, *args: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVE), "--home", str(home), "serve", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def until(self, begin: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(begin):
                return line.removeprefix(begin).strip()
        assert self.process.stderr is not None
        raise AssertionError(self.process.stderr.read())

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
        self.process.send_signal(number)
        return self.done()

    def done(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


Serve = Callable[..., Served]


@pytest.fixture
def serve(home: Path, base_folder: Path) -> Iterator[Serve]:
    running: list[Served] = []

    def start(*args: object, model: object = base_folder) -> Served:
        running.append(Served(home, model, "--port", "0", *args))
        return running[-1]

    yield start
    for served in running:
        if served.process.poll() is None:
            served.process.kill()
        served.process.communicate()


def test_the_first_start_prepares_everything(serve: Serve, cli: Cli) -> None:
    served = serve("--served-model-name", "smol")
    key = served.until("admin key: ")
    ready = served.until("ready: ")
    assert key.startswith("sk-")
    assert ready.startswith("http://127.0.0.1:")
    assert "/v1 serves smol (started in" in ready
    assert [model["name"] for model in cli("base", "list", "--json").json["base_models"]] == ["smol"]
    (made,) = cli("key", "list", "--json").json["keys"]
    assert (made["tenant"], made["is_admin"], made["label"]) == ("default", True, "first start")
    status, _, err = served.end()
    assert status == 130
    assert "starting smol" in err
    assert "stopping" in err

    again = serve("--served-model-name", "smol")
    again.until("ready: ")
    status, out, err = again.end(signal.SIGTERM)
    assert status == 0
    assert "admin key" not in out + err
    assert len(cli("key", "list", "--json").json["keys"]) == 1


def test_a_local_folder_lends_its_name(serve: Serve) -> None:
    assert "serves tiny" in serve().until("ready: ")


def test_a_model_that_is_not_here_yet_is_described_later(serve: Serve) -> None:
    served = serve(model="someone/not-in-any-cache")
    assert "serves someone/not-in-any-cache" in served.until("ready: ")
    status, _, err = served.end()
    assert status == 130
    assert "warning: adapters for someone/not-in-any-cache cannot be checked" in err


def test_an_engine_that_fails_shows_its_last_lines(serve: Serve) -> None:
    status, out, err = serve("--", "--exit", "3", "--say", "No module named 'vllm'").done()
    assert status == 6
    lines = err.splitlines()
    assert lines[-3:] == [
        "  No module named 'vllm'",
        "error: the engine ended with exit code 3 while it was starting",
        "hint: install the engine: pip install 'manylora[gpu]', or 'manylora[cpu]' where there is no GPU",
    ]
    assert "ready" not in out


def test_a_restart_is_told(serve: Serve, home: Path) -> None:
    served = serve()
    served.until("ready: ")
    engine = next(
        int(pid)
        for pid in (home / "run" / "pids").read_text().split()
        if "--socket" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    )
    os.kill(engine, signal.SIGKILL)
    assert served.process.stderr is not None
    for line in served.process.stderr:
        if line == "engine is back\n":
            break
        last = line
    assert last.startswith("engine was ended by signal 9; starting it again in 0.5 s")
    assert served.end()[0] == 130


def test_two_of_one_home(serve: Serve) -> None:
    first = serve()
    first.until("ready: ")
    status, _, err = serve().done()
    assert status == 5
    assert f"pid {first.process.pid}" in err


def test_a_taken_port(home: Path, base_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, _, err = Served(home, base_folder, "--port", taken.getsockname()[1]).done()
    assert status == 5
    assert "hint: give another --port" in err


def test_plain_progress_is_seldom(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    screen = ServeScreen("smol", tmp_path, lambda: None)
    for tenth in range(250):
        screen.waiting(tenth / 10, "loading")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"starting smol · {seconds} s · loading" for seconds in (0, 10, 20)]
    assert serve_screen.PLAIN_PROGRESS_S == 10


def test_progress_on_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    screen = ServeScreen("smol", tmp_path, lambda: None)
    screen.waiting(0.0, "[bold]not markup[/")
    screen.waiting(1.0, "")
    screen.stopping()
    screen.clear()
