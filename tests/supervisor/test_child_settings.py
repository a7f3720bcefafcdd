"""What a child of the supervisor is given: the parent's environment with the settings in full."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from manylora.settings import Settings


def test_a_child_reads_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYLORA_PORT", "1")
    monkeypatch.setenv("UNRELATED", "kept")
    settings = replace(
        Settings.from_env({}, home=tmp_path), port=9001, adapter_roots=(tmp_path / "a", tmp_path / "b"), host="::1"
    )
    env = settings.child_env()
    assert Settings.from_env(env) == settings
    assert env["UNRELATED"] == "kept"
    assert Settings.from_env(replace(settings, adapter_roots=()).child_env()).adapter_roots == ()


def test_home_overrides_its_variable(tmp_path: Path) -> None:
    assert Settings.from_env({"MANYLORA_HOME": "/elsewhere"}, home=tmp_path).run_dir == tmp_path / "run"
