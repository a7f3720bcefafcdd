from __future__ import annotations

from pathlib import Path

import pytest

from manylora.errors import InvalidSettings
from manylora.settings import Settings


def test_everything_lies_under_the_home(tmp_path: Path) -> None:
    settings = Settings.from_env({"MANYLORA_HOME": str(tmp_path)})
    assert settings.database_url == f"sqlite:///{tmp_path}/registry.db"
    assert settings.blob_url == f"file://{tmp_path}/blobs"
    assert (settings.disk_tier, settings.run_dir) == (tmp_path / "disk", tmp_path / "run")
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.adapter_roots == ()
    assert settings.adapter_memory == "12%"


def test_without_a_word_the_home_is_the_users() -> None:
    assert Settings.from_env({}).home == Path.home() / ".manylora"
    assert Settings.from_env({"MANYLORA_HOME": ""}).home == Path.home() / ".manylora"


def test_each_setting_is_read(tmp_path: Path) -> None:
    settings = Settings.from_env(
        {
            "MANYLORA_HOME": "relative",
            "MANYLORA_DATABASE_URL": "postgresql+psycopg://x/y",
            "MANYLORA_BLOB_URL": "s3://bucket/x",
            "MANYLORA_DISK_TIER": "~/disk",
            "MANYLORA_PORT": "0",
            "MANYLORA_ADAPTER_MEMORY": "8GiB",
            "MANYLORA_MAX_ADAPTER_BYTES": "2048",
            "MANYLORA_ADAPTER_ROOTS": f"{tmp_path}:{tmp_path / 'x'}:",
            "MANYLORA_UPSTREAM_TIMEOUT_S": "1.5",
            "HOME": "/elsewhere",
        }
    )
    assert settings.home == Path("relative").absolute()
    assert settings.database_url == "postgresql+psycopg://x/y"
    assert settings.blob_url == "s3://bucket/x"
    assert settings.disk_tier.is_absolute()
    assert settings.adapter_roots == (tmp_path.resolve(), (tmp_path / "x").resolve())
    assert settings.adapter_memory == "8GiB"
    assert (settings.port, settings.max_adapter_bytes, settings.upstream_timeout_s) == (0, 2048, 1.5)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PORT", "x"),
        ("PORT", "65536"),
        ("PORT", "-1"),
        ("PORT", "1.5"),
        ("PORT", "²"),
        ("PORT", "1_0"),
        ("MAX_BODY_BYTES", "10"),
        ("UPSTREAM_TIMEOUT_S", "0"),
        ("UPSTREAM_TIMEOUT_S", "nan"),
        ("UPSTREAM_TIMEOUT_S", "soon"),
        ("HOEM", "/x"),
    ],
)
def test_what_cannot_be_used_is_named(variable: str, value: str) -> None:
    with pytest.raises(InvalidSettings, match=f"MANYLORA_{variable}") as caught:
        Settings.from_env({f"MANYLORA_{variable}": value})
    assert caught.value.hint


def test_the_engines_own_variables_are_left_to_it() -> None:
    Settings.from_env({"MANYLORA_ENGINE_DISK_TIER": "/x", "MANYLORA_ALLOW_UNTESTED_VLLM": "1"})
