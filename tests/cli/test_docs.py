"""The documentation names every command, flag, exit code, JSON key and setting, and none that does not exist."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from manylora.cli import views
from manylora.cli.exit_codes import ExitCode
from manylora.cli.main import app
from manylora.engine import settings as engine_settings
from manylora.settings import PREFIX, Settings

DOCS = Path(__file__).parents[2] / "docs"
CLI = (DOCS / "cli.md").read_text(encoding="utf-8")


def sections() -> dict[str, str]:
    """Each heading that names a command, and what stands below it."""
    parts = re.split(r"^#+ (manylora\b.*)$", CLI, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{path} {name}")


COMMANDS = dict(commands(typer.main.get_command(app), "manylora"))


def test_every_command_has_its_section_and_no_other() -> None:
    assert set(sections()) == set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS)
def test_every_flag_and_argument_is_documented(path: str) -> None:
    text = sections()[path]
    for parameter in COMMANDS[path].params:
        if parameter.name == "help":
            continue
        is_flag = any(name.startswith("--") for name in parameter.opts)
        wanted = [name for name in parameter.opts if name.startswith("--")] if is_flag else parameter.metavar.split("|")
        assert all(name in text for name in wanted), (path, wanted)


@pytest.mark.parametrize("path", COMMANDS)
def test_no_flag_is_invented(path: str) -> None:
    usage = [line for line in sections()[path].splitlines() if line.startswith("    manylora")]
    known = {name for parameter in COMMANDS[path].params for name in parameter.opts} | {"--"}
    assert {flag for line in usage for flag in re.findall(r"--[a-z-]*", line)} <= known


def test_exit_codes() -> None:
    documented = {int(code): name for code, name in re.findall(r"^\| (\d+) \| (\w+) \|", CLI, re.MULTILINE)}
    assert documented == {int(code): code.name.lower() for code in ExitCode}


def test_json_keys() -> None:
    keys = set(re.findall(r'^        "(\w+)":', inspect.getsource(views), re.MULTILINE))
    assert len(keys) > 30
    assert not [key for key in keys if f"`{key}`" not in CLI]


def test_settings() -> None:
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    documented = re.findall(rf"^\| `({PREFIX}\w+)` \|", text, re.MULTILINE)
    ours = {PREFIX + field.name.upper() for field in dataclasses.fields(Settings)}
    engines = {value for value in vars(engine_settings).values() if isinstance(value, str) and value.startswith(PREFIX)}
    assert len(engines) >= len(dataclasses.fields(engine_settings.EngineSettings))
    assert sorted(documented) == sorted(ours | engines)


def test_setting_defaults() -> None:
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    plain = Settings.from_env({"MANYLORA_HOME": "/HOME"})
    for field in dataclasses.fields(Settings):
        value = getattr(plain, field.name)
        if isinstance(value, int | float):
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            assert f"| `{PREFIX}{field.name.upper()}` | `{shown}`" in text
