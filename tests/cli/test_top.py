"""`manylora top` against an engine and an agent that answer from memory."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manylora.cli.main import app

DEVICE = {
    "adapters": [
        {"engine_name": "acme/a@v1-0", "digest": "a" * 64, "tier": "device", "in_flight": 0, "size_bytes": 2048},
        {"engine_name": "acme/b@v2-0", "digest": "b" * 64, "tier": "device", "in_flight": 3, "size_bytes": 4096},
    ],
    "budget": {"adapters": 1024, "bytes": 10240, "used_bytes": 6144},
    "waiting": 2,
}
HOST = {
    "host": [
        {"digest": "b" * 64, "layout": "x", "size_bytes": 5000, "leases": 0},
        {"digest": "c" * 64, "layout": "x", "size_bytes": 1024, "leases": 1},
    ],
    "budget": {"bytes": 1 << 20, "used_bytes": 1 << 19},
}


@contextlib.contextmanager
def served(path: Path, status: int, body: bytes) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "local"

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with socketserver.UnixStreamServer(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path


@pytest.fixture
def engine(home: Path) -> Iterator[None]:
    with served(home / "run" / "engine.sock", 200, json.dumps(DEVICE).encode()):
        yield


@pytest.fixture
def agent(home: Path) -> Iterator[None]:
    with served(home / "run" / "agent-http.sock", 200, json.dumps(HOST).encode()):
        yield


def run(home: Path, *args: str) -> Any:
    return CliRunner().invoke(app, ["--home", str(home), "top", *args], env={"COLUMNS": "120"})


@pytest.mark.usefixtures("engine", "agent")
def test_once_shows_who_is_where_those_in_use_first(home: Path) -> None:
    result = run(home, "--once")
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert lines[0] == "adapter memory  6.0 KiB of 10.0 KiB (60%)  2 adapters, 2 requests wait"
    assert lines[1] == "host memory     512.0 KiB of 1.0 MiB (50%)  2 adapters"
    assert [line.split() for line in lines[4:]] == [
        ["acme/b@v2-0", "device", "+", "host", "3", "4.0", "KiB"],
        ["acme/a@v1-0", "device", "0", "2.0", "KiB"],
        ["c" * 16, "host", "-", "1.0", "KiB"],
    ]


@pytest.mark.usefixtures("engine", "agent")
def test_json_is_what_both_say(home: Path) -> None:
    assert json.loads(run(home, "--json").output) == {"device": DEVICE, "host": HOST}


@pytest.mark.usefixtures("engine")
def test_without_an_agent_the_engine_is_shown(home: Path) -> None:
    assert "no agent answers" in run(home, "--once").output
    assert json.loads(run(home, "--json").output)["host"] is None


def test_without_an_engine_it_says_what_to_start(home: Path) -> None:
    result = run(home, "--once")
    assert result.exit_code != 0


@pytest.mark.parametrize(("status", "body"), [(503, b"{}"), (200, b"[]"), (200, b"{")])
def test_an_engine_that_answers_nonsense_is_no_engine(home: Path, status: int, body: bytes) -> None:
    with served(home / "run" / "engine.sock", status, body):
        assert run(home, "--once").exit_code != 0
