"""Files that are damaged after they were admitted harm their own requests only, and the error says whose they are."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from harness import evil
from harness.asking import Question, ask, ask_right, async_client, question, traffic
from harness.crowd import variant
from harness.stack import TENANT, Stack
from harness.zoo import BASE, Zoo

from manylora.tiers.disk import DiskTier

WEIGHTS = "adapter_model.safetensors"


def cut_short(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def not_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\x80\x04\x95 this was never a tensor" * 100)


def lose_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def lose_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def nonsense_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": "many", "target_modules": 7}')


DAMAGES: tuple[Callable[[Path], None], ...] = (
    cut_short,
    not_safetensors,
    lose_weights,
    lose_config,
    nonsense_config,
    evil.shapes_transposed,
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_damaged_in_the_disk_tier(stack: Stack, zoo: Zoo, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Of a version that no other tier has: its packed form would answer rightly, whatever becomes of its folder."""
    engine, gateway = stack.engine_pids(), stack.gateway_pid()
    recipe = f"fleet{60 + DAMAGES.index(damage):03d}"
    asked = question(recipe, zoo.fleet_prompt(recipe), model=f"{TENANT}/damaged-{recipe}")
    folder = _on_disk(stack, zoo, recipe, asked, tmp_path)
    damage(folder)
    async with async_client(stack) as client, traffic(client, _others(stack, zoo), concurrency=3) as log:
        errors = await asyncio.gather(*(_error_of(client, asked) for _ in range(4)))
        for error in errors:
            assert error.status_code >= 400
            assert f"damaged-{recipe}" in error.message, error.message
        await asyncio.sleep(0.5)
    assert not log.wrong
    assert not log.errors
    assert log.right > 0
    assert stack.engine_pids() == engine
    assert stack.gateway_pid() == gateway
    shutil.rmtree(folder, ignore_errors=True)
    async with async_client(stack) as client:
        await ask_right(client, asked)


async def test_lost_after_it_was_loaded(stack: Stack, zoo: Zoo, tmp_path: Path) -> None:
    """The folder goes while the adapter is in memory; evicted and asked for again, it is fetched again or refused."""
    engine = stack.engine_pids()
    recipe = "fleet070"
    asked = question(recipe, zoo.fleet_prompt(recipe), model=f"{TENANT}/damaged-{recipe}")
    folder = _on_disk(stack, zoo, recipe, asked, tmp_path)
    crowd = [f"fleet{number:03d}" for number in range(71, 83)]
    for name in crowd:
        stack.publish(name)
    async with async_client(stack) as client:
        await ask_right(client, asked)
        shutil.rmtree(folder)
        for name in crowd:
            await ask_right(client, question(name, zoo.fleet_prompt(name)))
        await ask_right(client, asked)
        await ask_right(client, question(BASE, zoo.group("short")[0]))
    assert stack.engine_pids() == engine


def _on_disk(stack: Stack, zoo: Zoo, recipe: str, asked: Question, made: Path) -> Path:
    """Publish and fetch into the disk tier, where the gateway finds it complete; nobody has read it yet."""
    published = stack.publish_folder(variant(zoo, recipe, secrets.randbelow(1000), made), asked.model)
    digest = published.version.digest
    tier = DiskTier(stack.settings.disk_tier)
    return tier.ensure(digest, lambda into: stack.catalog.download(digest, into))


def _others(stack: Stack, zoo: Zoo) -> list[Question]:
    for name in ("r4", "r32"):
        stack.publish(name)
    return [question(name, prompt) for name in (BASE, "r4", "r32") for prompt in zoo.group("short")]


async def _error_of(client: openai.AsyncOpenAI, asked: Question) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as refused:
        await ask(client, asked)
    return refused.value
