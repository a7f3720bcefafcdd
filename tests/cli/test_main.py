"""The command line as a whole: help, errors, exit codes, start-up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import manylora
from manylora.cli import session
from manylora.cli.exit_codes import ExitCode, exit_code
from manylora.errors import ManyloraError

Cli = Callable[..., Any]


def run(*args: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "manylora", *args],
        env={**os.environ, "MANYLORA_HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"manylora {manylora.__version__}\n"


def test_help_is_for_people(cli: Cli) -> None:
    shown = cli("--help")
    assert shown.code == 0
    assert "A first session:" in shown.out
    for command in ("serve", "adapter", "base", "tenant", "key", "grant", "audit", "demo"):
        assert re.search(rf"^  {command}\s+\S", shown.out, re.MULTILINE)
    assert "..." not in shown.out.partition("Commands:")[2]


def test_no_command_shows_help(cli: Cli) -> None:
    shown = cli()
    assert shown.code == 2
    assert "Commands:" in shown.err


def test_help_imports_nothing_heavy(home: Path) -> None:
    script = (
        "import sys\nfrom manylora.cli.main import app\n"
        "try:\n    app(['adapter', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'asyncio', 'rich', 'sqlalchemy', 'obstore', 'aiohttp', 'torch', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


def test_a_push_imports_nothing_heavy(seeded: Cli, peft: Callable[..., Path], home: Path) -> None:
    """It runs beside an engine that needs the processor."""
    script = (
        "import sys\nfrom manylora.cli.main import app\n"
        "try:\n    app(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "heavy = {'asyncio', 'rich', 'sqlalchemy', 'alembic', 'pydantic', 'aiohttp', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    command = [sys.executable, "-c", script, "adapter", "push", str(peft()), "acme/x", "--meta", "run=1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60, env={**os.environ, "MANYLORA_HOME": str(home)})


@pytest.mark.parametrize(
    "args", [("adapter", "psh"), ("nope",), ("adapter", "push"), ("audit", "--limit", "x"), ("adapter", "list", "-z")]
)
def test_a_wrong_command_line_is_two_lines_and_code_2(cli: Cli, args: tuple[str, ...]) -> None:
    outcome = cli(*args)
    assert (outcome.code, outcome.out) == (2, "")
    error, hint = outcome.err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: `manylora") and "--help" in hint


def test_every_error_has_its_exit_code() -> None:
    def kinds(kind: type[ManyloraError]) -> list[type[ManyloraError]]:
        return [kind, *(below for child in kind.__subclasses__() for below in kinds(child))]

    ours = [kind for kind in kinds(ManyloraError) if kind.__module__ == "manylora.errors"]
    codes = {kind.__name__: exit_code(kind("x")) for kind in ours}
    assert codes.pop("ManyloraError") is ExitCode.UNEXPECTED
    assert ExitCode.UNEXPECTED not in codes.values()
    assert (codes["InvalidName"], codes["NotFound"], codes["Conflict"]) == (3, 4, 5)
    assert (codes["Unavailable"], codes["CorruptBlob"], codes["PermissionDenied"]) == (6, 7, 8)


def break_it(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(session.Session, "catalog", fail)


def test_an_unexpected_error_is_logged_not_shown(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch, RuntimeError("boom\nsecond line"))
    outcome = cli("adapter", "list")
    assert outcome.code == 1
    assert outcome.err.splitlines() == [
        "error: unexpected: RuntimeError: boom second line",
        f"hint: the traceback is in {home / 'run' / 'cli.log'}; --debug shows it",
    ]
    assert "Traceback" in (home / "run" / "cli.log").read_text()


def test_debug_shows_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch, RuntimeError("boom"))
    outcome = cli("--debug", "adapter", "list")
    assert outcome.code == 1
    assert "Traceback" in outcome.err


def test_an_unwritable_home_still_gives_the_error(monkeypatch: pytest.MonkeyPatch, cli: Cli, home: Path) -> None:
    home.write_text("a file")
    outcome = cli("adapter", "list")
    assert outcome.code in (1, 3, 6)
    assert outcome.err.startswith("error: ")
    assert "Traceback" not in outcome.err


def test_interrupted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch, KeyboardInterrupt())
    outcome = cli("adapter", "list")
    assert (outcome.code, outcome.err) == (130, "")


def test_a_misspelt_setting_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYLORA_PROT", "8000")
    outcome = cli("adapter", "list")
    assert outcome.code == 3
    assert "MANYLORA_PROT" in outcome.err


def test_home_overrides_the_environment(cli: Cli, tmp_path: Path) -> None:
    assert cli("--home", tmp_path / "elsewhere", "tenant", "create", "acme").code == 0
    assert (tmp_path / "elsewhere" / "registry.db").exists()
    assert cli("tenant", "list", "--json").json == {"tenants": []}


def test_as_a_process(home: Path) -> None:
    made = run("tenant", "create", "acme", home=home)
    assert (made.returncode, made.stderr) == (0, "")
    again = run("tenant", "create", "acme", home=home)
    assert again.returncode == 5
    assert again.stderr.startswith("error: ")


def test_a_closed_pipe_is_no_traceback(home: Path) -> None:
    run("tenant", "create", "acme", home=home)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "manylora", "tenant", "list", "--json"],
        env={**os.environ, "MANYLORA_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
