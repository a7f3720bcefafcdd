"""vLLM's seams: the check itself on small sources, and the contract with every release that we say we fit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from manylora.engine.seams import SEAMS, TESTED_VERSIONS, Seam, problems


def _sources() -> ModuleType:
    """The sibling file, which is no package's member."""
    spec = importlib.util.spec_from_file_location("vllm_sources", Path(__file__).with_name("vllm_sources.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["0.26.0", "0.33.0", "installed"])
def test_release_has_every_seam_in_the_expected_shape(version: str) -> None:
    if version == "installed":
        pytest.importorskip("torch")
    assert list(problems(SEAMS, _sources().source_reader(version))) == []


def test_each_module_is_read_once() -> None:
    read: list[str] = []

    def source_of(module: str) -> None:
        read.append(module)

    list(problems(SEAMS, source_of))
    assert len(read) == len(set(read))


def test_the_installed_release_is_a_tested_one() -> None:
    from manylora.engine.launch import require_engine

    assert ".".join(require_engine().split(".")[:2]) in TESTED_VERSIONS


SOURCE = """
from elsewhere import Imported

class Door:
    opened: int

    def __init__(self, width, *, height=1):
        self.colour = width

    async def open(self, key):
        pass
"""


@pytest.mark.parametrize(
    ("seam", "expected"),
    [
        (Seam("m", "Door", ("width", "height"), ("colour", "opened", "open")), ""),
        (Seam("m", "Door.open", ("key",)), ""),
        (Seam("m", "Imported"), ""),
        (Seam("m", "Window", why="light"), "m.Window does not exist (light)"),
        (Seam("m", "Door.close"), "m.Door.close does not exist ()"),
        (Seam("m", "Door", ("depth",)), "m.Door no longer takes depth ()"),
        (Seam("m", "Door.open", ("lock",)), "m.Door.open no longer takes lock ()"),
        (Seam("m", "Door", (), ("knob",)), "m.Door no longer has knob ()"),
        (Seam("gone", "Door"), "gone does not exist ()"),
        (Seam("renamed", "Door", former_module="m"), ""),
        (Seam("renamed", "Window", former_module="m"), "renamed.Window does not exist ()"),
        (Seam("renamed", "Door", former_module="gone"), "renamed does not exist ()"),
    ],
)
def test_says_what_changed(seam: Seam, expected: str) -> None:
    found = list(problems((seam,), {"m": SOURCE}.get))
    assert found == ([expected] if expected else [])


@pytest.mark.skipif("vllm" not in sys.modules and importlib.util.find_spec("vllm") is None, reason="needs vLLM's files")
def test_every_seam_is_one_that_the_contract_would_miss() -> None:
    """Each declared name and parameter must be looked for: a release without it must not pass."""
    read = _sources().source_reader("installed")
    for seam in SEAMS:
        source = read(seam.module)
        assert source is not None
        for name in (*seam.parameters, *seam.attributes):
            without = source.replace(name, "x" * 5)
            assert list(problems((seam,), {seam.module: without}.get)), f"{seam.name}: {name} may vanish unnoticed"
