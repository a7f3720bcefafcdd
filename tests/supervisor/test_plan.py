"""From settings and flags to children."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from manylora.errors import Conflict, InvalidSettings
from manylora.settings import Settings
from manylora.supervisor import plan
from manylora.supervisor.run_dir import RunDir


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_env({"MANYLORA_HOME": str(tmp_path), "MANYLORA_PORT": "9001"})


def test_engine_and_gateway_share_socket_name_and_settings(settings: Settings, tmp_path: Path) -> None:
    run_dir = RunDir(settings.run_dir, -1)
    made = plan.make(settings, run_dir, "/models/x", "base", ["--max-loras", "3"])
    assert made.engine.socket == run_dir.engine_socket
    assert str(run_dir.engine_socket) in made.engine.argv
    assert str(run_dir.engine_socket) in made.gateway.argv
    assert {"/models/x", "base", "--max-loras", "3"} <= set(made.engine.argv)
    assert made.gateway.argv[-2:] == ("--base-model", "base")
    assert made.gateway.env["MANYLORA_HOME"] == str(tmp_path)
    assert made.gateway.env["MANYLORA_PORT"] == "9001"
    assert made.engine.env["MANYLORA_ENGINE_DISK_TIER"] == str(settings.disk_tier)
    assert made.url == "http://127.0.0.1:9001/v1"
    assert plan.GATEWAY_GRACE_S + plan.ENGINE_GRACE_S + plan.AGENT_GRACE_S < 8


def test_the_agent_and_the_engine_share_a_socket(settings: Settings) -> None:
    run_dir = RunDir(settings.run_dir, -1)
    made = plan.make(settings, run_dir, "m", "base", [])
    assert made.agent is not None
    assert str(run_dir.agent_socket) in made.agent.argv
    assert made.engine.env["MANYLORA_ENGINE_AGENT_SOCKET"] == str(run_dir.agent_socket)
    assert made.engine.env["MANYLORA_ENGINE_RUN_DIR"] == str(run_dir.path)
    assert made.agent.env["MANYLORA_DISK_TIER"] == str(settings.disk_tier)


def test_adapter_memory_reaches_the_engine(tmp_path: Path) -> None:
    env = {"MANYLORA_HOME": str(tmp_path), "MANYLORA_ADAPTER_MEMORY": "3GiB"}
    settings = Settings.from_env(env)
    made = plan.make(settings, RunDir(settings.run_dir, -1), "m", "base", [])
    assert made.engine.env["MANYLORA_ENGINE_ADAPTER_MEMORY"] == "3GiB"


def test_adapter_memory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    settings = Settings.from_env({"MANYLORA_HOME": str(tmp_path), "MANYLORA_ADAPTER_MEMORY": "much"})
    with pytest.raises(InvalidSettings, match="'much'"):
        plan.make(settings, RunDir(settings.run_dir, -1), "m", "base", [])


@pytest.mark.parametrize(
    "flag",
    ["--uds=/tmp/x", "--host", "--port=1", "--api-key", "--lora-modules", "--lora_modules", "--served-model-name"],
)
def test_flags_that_would_bypass_manylora_are_refused(settings: Settings, flag: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        plan.make(settings, RunDir(settings.run_dir, -1), "m", "base", [flag])
    assert caught.value.hint


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/v1"),
        ("0.0.0.0", "http://127.0.0.1:80/v1"),
        ("::", "http://127.0.0.1:80/v1"),
        ("::1", "http://[::1]:80/v1"),
        ("gpu.example", "http://gpu.example:80/v1"),
    ],
)
def test_public_url(host: str, url: str) -> None:
    assert plan.public_url(host, 80) == url


def test_a_taken_port_is_a_conflict() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Conflict, match="cannot listen") as caught:
            plan.free_port("127.0.0.1", taken.getsockname()[1])
    assert "--port" in caught.value.hint


def test_port_0_is_any_free_port() -> None:
    assert plan.free_port("127.0.0.1", 0) > 0


def test_an_unknown_host_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="--host"):
        plan.free_port("no such host", 1)
