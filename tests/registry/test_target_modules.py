from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manylora.errors import InvalidAdapter
from manylora.registry import target_modules
from manylora.registry.peft_config import parse_config
from manylora.registry.peft_format import read_peft_folder
from manylora.registry.target_modules import unselected

PATHS = {f"model.layers.{layer}.self_attn.{name}": layer for layer in (0, 1) for name in ("q_proj", "v_proj")}
Q = [path for path in PATHS if path.endswith("q_proj")]
V = [path for path in PATHS if path.endswith("v_proj")]


def outside(targets: Any, **fields: Any) -> list[str]:
    raw = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets, **fields}
    return unselected(parse_config(raw), dict(PATHS))


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (None, []),
        ("all-linear", []),
        ("All-Linear", []),
        (["q_proj", "v_proj"], []),
        (["q_proj"], V),
        (["proj"], Q + V),
        ([Q[0], "v_proj"], [Q[1]]),
        (r".*\.(q_proj|v_proj)", []),
        (r".*q_proj$", V),
        (r"q_proj", Q + V),
        (r"model\.layers\.0\..*", [Q[1], V[1]]),
        (r"", Q + V),
        # These are matched in a process of their own.
        (r"^(?!.*vision).*(?:q_proj|v_proj).*", []),
        (r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|k_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.(?:(?:up_proj)))", V),
        (r"(a+)+", Q + V),
    ],
)
def test_what_peft_would_leave_out(targets: Any, expected: list[str]) -> None:
    assert sorted(outside(targets)) == sorted(expected)


def test_layers_narrow_the_choice() -> None:
    assert sorted(outside(["q_proj"], layers_to_transform=[0])) == sorted([*V, Q[1]])


def test_the_same_engine_as_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching apart gives what matching here gives."""
    patterns = [r".*\.(q_proj|v_proj)", r".*q_proj$", r"q_proj", r"model\.layers\.0\..*"]
    here = [outside(pattern) for pattern in patterns]
    monkeypatch.setattr(target_modules, "is_cheap_pattern", lambda _: False)
    assert [outside(pattern) for pattern in patterns] == here


@pytest.mark.parametrize("pattern", [r"(.*)*\d\d\d\d", r"([a-z_.0-9]+)+X", r"(?:.*.*.*.*.*.*)*X"])
def test_patterns_that_take_for_ever_are_cut_off(pattern: str) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidAdapter, match="target_modules is ") as caught:
        outside(pattern)
    assert "list of module names" in caught.value.hint
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("pattern", ["(q_proj", "*q", "(?<!a+)b", "q_proj" * 1000])
def test_what_is_no_regular_expression(pattern: str) -> None:
    with pytest.raises(InvalidAdapter, match="target_modules is ") as caught:
        outside(pattern)
    assert "list of module names" in caught.value.hint
    assert len(str(caught.value)) < 250


def test_a_push_hears_of_it(make: Callable[..., Path]) -> None:
    adapter = read_peft_folder(make(target_modules=r".*\.q_proj"), max_bytes=1 << 20)
    (warning,) = adapter.warnings
    assert warning.startswith("2 trained modules are not selected by adapter_config.json")
    assert read_peft_folder(make(target_modules=r".*\.[qv]_proj"), max_bytes=1 << 20).warnings == ()
