"""The snippets of `--keep` can be used as they are."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

from manylora.demo.farewell import snippets

CURL, PYTHON, PUSH = snippets("http://127.0.0.1:8000/v1", "sk-abc_-1", Path("/tmp/home"))


def test_curl_is_one_command_with_json() -> None:
    words = shlex.split(CURL.replace("\\\n", " "))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer sk-abc_-1" in words
    assert json.loads(words[-1])["model"] == "pirate"


def test_python_parses() -> None:
    ast.parse(PYTHON)
    assert 'api_key="sk-abc_-1"' in PYTHON


def test_push_names_this_runs_registry() -> None:
    assert PUSH.startswith("export MANYLORA_HOME=/tmp/home\n")
