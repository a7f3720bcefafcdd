"""The snippets of `--keep` can be used as they are."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

import pytest

from manylora.demo.farewell import manylora_command, snippets

CURL, PYTHON, PUSH = snippets("http://127.0.0.1:8000/v1", "sk-abc_-1", Path("/tmp/my home"), ".venv/bin/manylora")


def test_curl_is_one_command_with_json() -> None:
    words = shlex.split(CURL.replace("\\\n", " "))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer sk-abc_-1" in words
    assert json.loads(words[-1])["model"] == "pirate"


def test_python_parses() -> None:
    ast.parse(PYTHON)
    assert 'api_key="sk-abc_-1"' in PYTHON


def test_push_names_this_runs_registry() -> None:
    assert PUSH.splitlines() == [
        "export MANYLORA_HOME='/tmp/my home'",
        ".venv/bin/manylora adapter list",
        ".venv/bin/manylora adapter push FOLDER acme/NAME",
    ]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    executable = tmp_path / "check out" / ".venv" / "bin" / "manylora"
    executable.parent.mkdir(parents=True)
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    return executable


def test_by_name_where_the_shell_finds_this_very_program(installed: Path, tmp_path: Path) -> None:
    assert manylora_command(installed, tmp_path, str(installed)) == "manylora"
    (tmp_path / "link").symlink_to(installed)
    assert manylora_command(installed, tmp_path, str(tmp_path / "link")) == "manylora"


@pytest.mark.parametrize("on_path", [None, "/usr/bin/manylora"])
def test_by_the_shorter_path_where_it_does_not(installed: Path, tmp_path: Path, on_path: str | None) -> None:
    assert manylora_command(installed, tmp_path / "check out", on_path) == ".venv/bin/manylora"
    assert manylora_command(installed, tmp_path, on_path) == "'check out/.venv/bin/manylora'"
    assert manylora_command(Path("/bin/sh"), tmp_path / "deep" / "er", None) == "/bin/sh"


def test_by_its_module_where_it_was_started_so(tmp_path: Path) -> None:
    module = tmp_path / "main.py"
    module.write_text("")
    assert manylora_command(module, tmp_path, None).endswith(" -m manylora")
