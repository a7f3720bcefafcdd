from __future__ import annotations

from pathlib import Path

import pytest

from manylora.engine.settings import EngineSettings
from manylora.errors import InvalidSettings


def test_the_defaults() -> None:
    assert EngineSettings.from_env({}) == EngineSettings(None, 30.0, 60.0, False)


def test_everything_can_be_set() -> None:
    env = {
        "MANYLORA_ENGINE_DISK_TIER": "/tier",
        "MANYLORA_ENGINE_ADMISSION_WAIT_S": "2.5",
        "MANYLORA_ENGINE_LOAD_TIMEOUT_S": "",
        "MANYLORA_ALLOW_UNTESTED_VLLM": "1",
    }
    assert EngineSettings.from_env(env) == EngineSettings(Path("/tier"), 2.5, 60.0, True)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e9", "soon"])
@pytest.mark.parametrize("variable", ["MANYLORA_ENGINE_ADMISSION_WAIT_S", "MANYLORA_ENGINE_LOAD_TIMEOUT_S"])
def test_seconds_are_positive_numbers(variable: str, text: str) -> None:
    with pytest.raises(InvalidSettings, match=f"{variable}='{text}'") as caught:
        EngineSettings.from_env({variable: text})
    assert caught.value.hint == "give a positive number of seconds"
