"""The engine's command line: our flags, the user's, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from manylora.engine import launch
from manylora.errors import InvalidSettings

PATHS = {"socket": Path("/run/e.sock"), "disk_tier": Path("/tier"), "served_model_name": "base"}


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_listens_on_the_socket_only_with_the_plugin_in_place() -> None:
    built = launch.command("some/model", env={}, **PATHS)
    assert flag(built.argv, "--uds") == "/run/e.sock"
    assert flag(built.argv, "--middleware") == launch.MIDDLEWARE
    assert flag(built.argv, "--worker-extension-cls") == launch.WORKER_EXTENSION
    assert "--enable-lora" in built.argv
    assert "--host" not in built.argv
    assert built.env["MANYLORA_ENGINE_DISK_TIER"] == "/tier"


def test_users_flags_win_over_our_defaults() -> None:
    built = launch.command("m", vllm_args=["--max-loras=2", "--max_lora_rank", "16"], env={}, **PATHS)
    assert [part for part in built.argv if "loras" in part] == ["--max-cpu-loras", "--max-loras=2"]
    assert "--max-lora-rank" not in built.argv


@pytest.mark.parametrize(
    "refused", ["--uds", "--port=1", "--api-key", "--lora-modules", "--api_server_count", "--host", "--lora-mod"]
)
def test_flags_that_would_open_a_door_are_refused_by_name(refused: str) -> None:
    with pytest.raises(InvalidSettings, match=refused.split("=")[0].replace("_", "-")):
        launch.command("m", vllm_args=[refused, "x"], env={}, **PATHS)


def test_load_routes_stay_closed_whatever_the_environment_says() -> None:
    built = launch.command("m", env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_API_KEY": "k"}, **PATHS)
    assert built.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    assert "VLLM_API_KEY" not in built.env


@pytest.mark.parametrize(("given", "expected"), [("", ""), ("other", "other,manylora"), ("manylora,x", "manylora,x")])
def test_plugin_is_among_those_that_vllm_is_told_to_load(given: str, expected: str) -> None:
    built = launch.command("m", env={"VLLM_PLUGINS": given}, **PATHS)
    assert built.env["VLLM_PLUGINS"] == expected


@pytest.mark.parametrize(
    ("args", "batch", "held"),
    [
        ([], "1024", "1024"),
        (["--max-loras", "2048"], "2048", "2048"),
        (["--max-loras=4"], "4", "1024"),
        (["--max_loras=2000"], None, "2000"),
        (["--max-cpu-loras", "16"], "16", "16"),
        (["--max_cpu_loras=4096"], "1024", None),
        (["--max-loras=4", "--max-cpu-loras=8"], None, None),
    ],
)
def test_memory_holds_at_least_a_batch(args: list[str], batch: str | None, held: str | None) -> None:
    argv = launch.command("m", vllm_args=args, env={}, **PATHS).argv
    given = {name.replace("_", "-"): value for name, _, value in (arg.partition("=") for arg in args)}
    for name, expected in (("--max-loras", batch), ("--max-cpu-loras", held)):
        if expected is None:
            assert name not in argv
        elif name not in given:
            assert flag(argv, name) == expected


def test_adapter_memory_reaches_the_engine() -> None:
    plain = launch.command("m", env={"MANYLORA_ENGINE_ADAPTER_MEMORY": "1%"}, **PATHS)
    assert plain.env["MANYLORA_ENGINE_ADAPTER_MEMORY"] == "12%"
    assert launch.command("m", adapter_memory="8GiB", env={}, **PATHS).env["MANYLORA_ENGINE_ADAPTER_MEMORY"] == "8GiB"


def test_adapter_memory_that_cannot_be_used_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidSettings, match="'95%'") as caught:
        launch.command("m", adapter_memory="95%", env={}, **PATHS)
    assert caught.value.hint
