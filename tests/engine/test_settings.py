from __future__ import annotations

from pathlib import Path

import pytest

from manylora.engine.settings import EngineSettings
from manylora.errors import InvalidSettings
from manylora.settings import MemorySize


def test_the_defaults() -> None:
    assert EngineSettings.from_env({}) == EngineSettings(None, None, None, MemorySize(share=0.12), 30.0, 60.0, False)


def test_everything_can_be_set() -> None:
    env = {
        "MANYLORA_ENGINE_DISK_TIER": "/tier",
        "MANYLORA_ENGINE_RUN_DIR": "/run/m",
        "MANYLORA_ENGINE_AGENT_SOCKET": "/run/m/agent.sock",
        "MANYLORA_ENGINE_ADAPTER_MEMORY": "8GiB",
        "MANYLORA_ENGINE_ADMISSION_WAIT_S": "2.5",
        "MANYLORA_ENGINE_LOAD_TIMEOUT_S": "",
        "MANYLORA_ALLOW_UNTESTED_VLLM": "1",
    }
    memory = MemorySize(bytes_=8 << 30)
    assert EngineSettings.from_env(env) == EngineSettings(
        Path("/tier"), Path("/run/m"), Path("/run/m/agent.sock"), memory, 2.5, 60.0, True
    )


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e9", "soon"])
@pytest.mark.parametrize("variable", ["MANYLORA_ENGINE_ADMISSION_WAIT_S", "MANYLORA_ENGINE_LOAD_TIMEOUT_S"])
def test_seconds_are_positive_numbers(variable: str, text: str) -> None:
    with pytest.raises(InvalidSettings, match=f"{variable}='{text}'") as caught:
        EngineSettings.from_env({variable: text})
    assert caught.value.hint == "give a positive number of seconds"


@pytest.mark.parametrize(
    ("text", "of_a_gibibyte"),
    [
        ("12%", 128849018),
        ("90%", 966367641),
        ("0.5%", 5368709),
        (" 8GiB ", 8 << 30),
        ("1.5 GiB", 3 << 29),
        ("512MiB", 512 << 20),
        ("64KiB", 64 << 10),
        ("1000000", 1_000_000),
    ],
)
def test_adapter_memory_is_a_share_or_a_size(text: str, of_a_gibibyte: int) -> None:
    assert MemorySize.parse(text).of(1 << 30) == of_a_gibibyte


BAD_SIZES = "0|0%|91%|100%|-1|-5%|8GB|8gib|8G|GiB|%|12 percent|nan|inf|1e9|1,5GiB|8GiB 1|0x10"


@pytest.mark.parametrize("text", ["", *BAD_SIZES.split("|")])
def test_adapter_memory_that_cannot_be_used(text: str) -> None:
    with pytest.raises(InvalidSettings, match="adapter memory of") as caught:
        MemorySize.parse(text)
    assert "8GiB" in caught.value.hint


def test_the_engine_refuses_adapter_memory_that_cannot_be_used() -> None:
    with pytest.raises(InvalidSettings, match="'lots'"):
        EngineSettings.from_env({"MANYLORA_ENGINE_ADAPTER_MEMORY": "lots"})
