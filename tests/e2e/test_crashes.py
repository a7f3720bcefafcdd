"""kill -9 of engine, gateway and pushes at random moments: everything acknowledged is served and verifies.

MANYLORA_TEST_ROUNDS=20 asks for the full number of each; by default few, as an engine takes most of a minute to return.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import time
from collections.abc import Callable

import openai
import pytest
from harness import processes
from harness.asking import Question, TrafficLog, ask_all, async_client, question, traffic
from harness.stack import ACTOR, TENANT, Stack, cli_argv
from harness.zoo import BASE, Zoo

from manylora.adapter import AdapterName
from manylora.errors import NotFound

ROUNDS = int(os.environ.get("MANYLORA_TEST_ROUNDS", "0"))
ENGINE_KILLS = ROUNDS or 2
GATEWAY_KILLS = ROUNDS or 5
PUSH_KILLS = ROUNDS or 12
GATEWAY_LIMIT_S = 45.0
"""The wait before a restart doubles with every death in a row, up to 10 s."""
LONG_LIMIT_S = 300 + 90 * ENGINE_KILLS
RECIPES = ("r4", "r8-fp16", "rslora", "patterns", "gen1", "gen2")


@pytest.fixture(autouse=True)
def acknowledged(stack: Stack) -> None:
    """What was pushed with success before anything is killed; two names have a version that isn't their newest live."""
    for name in RECIPES:
        stack.publish(name)
    for name in ("gen1", "gen2"):
        stack.publish("gen3", name, promote=False)
        stack.catalog.promote(AdapterName(TENANT, name), 1, actor=ACTOR)


def questions(zoo: Zoo) -> list[Question]:
    pinned = [question("gen3", prompt, model=f"{TENANT}/gen1@v2") for prompt in zoo.group("short")]
    asked = [question(name, prompt) for name in (BASE, *RECIPES) for prompt in zoo.group("short", "chat")]
    return [*asked, *pinned, *(question(name, zoo.group("medium")[0], stream=True) for name in RECIPES)]


@pytest.mark.timeout(LONG_LIMIT_S)
async def test_the_gateway_is_killed(stack: Stack, zoo: Zoo, record_figures: Callable[[str, object], None]) -> None:
    draw, engine, recoveries, met = random.Random(11), stack.engine_pids(), [], 0
    for _ in range(GATEWAY_KILLS):
        async with async_client(stack) as client, traffic(client, questions(zoo), concurrency=4) as log:
            await asyncio.sleep(draw.uniform(0.2, 1.5))
            processes.kill_hard([stack.gateway_pid()])
            recoveries.append(round(await asyncio.to_thread(stack.wait_ready, GATEWAY_LIMIT_S), 2))
        _only_clean_errors(log)
        met += len(log.errors)
        async with async_client(stack) as client:
            await ask_all(client, questions(zoo))
    record_figures("gateway_kills", {"recovery_s": recoveries, "requests_cut_off": met})
    assert stack.engine_pids() == engine
    _everything_verifies(stack)


@pytest.mark.timeout(LONG_LIMIT_S)
async def test_pushes_are_killed(stack: Stack, zoo: Zoo, record_figures: Callable[[str, object], None]) -> None:
    """A push that is killed leaves a whole version or nothing; the same push again succeeds, and serves."""
    engine, draw = stack.engine_pids(), random.Random(12)
    whole_push_s = commit_s = await asyncio.to_thread(_push_s, stack, zoo)
    outcomes = {"acknowledged": 0, "there": 0, "absent": 0}
    for number in range(PUSH_KILLS):
        recipe, name = f"fleet{number:03d}", AdapterName(TENANT, f"killed{number}")
        delay_s = commit_s * (draw.uniform(0.9, 1.05) if number % 3 else draw.uniform(0.4, 0.9))
        code = await asyncio.to_thread(_killed_push, stack, zoo, recipe, name, delay_s)
        seen = _versions(stack, name)
        assert code != 0 or seen == 1, "a push was acknowledged and its version is not there"
        # Close in on the moment of the commit, whatever else the machine does: that is where harm could be done.
        commit_s *= 0.95 if seen else 1.1
        outcomes["acknowledged" if code == 0 else "there" if seen else "absent"] += 1
        asked = question(recipe, zoo.fleet_prompt(recipe), model=str(name))
        async with async_client(stack) as client:
            if seen:
                await ask_all(client, [asked])
            again = stack.publish(recipe, name.name)
            assert again.version.ref.number == 1
            await ask_all(client, [asked])
    record_figures("push_kills", {"whole_push_s": round(whole_push_s, 2), **outcomes})
    assert stack.engine_pids() == engine
    _everything_verifies(stack)


@pytest.mark.timeout(LONG_LIMIT_S)
async def test_the_engine_is_killed(stack: Stack, zoo: Zoo, record_figures: Callable[[str, object], None]) -> None:
    """Any of its processes; the gateway stays, answers errors in OpenAI's shape meanwhile, and serves all again."""
    draw, gateway, recoveries, met = random.Random(13), stack.gateway_pid(), [], 0
    roles = (processes.ENGINE_CORE, processes.API_SERVER, processes.WORKER)
    for number in range(ENGINE_KILLS):
        before = stack.engine_pids()
        async with async_client(stack) as client, traffic(client, questions(zoo), concurrency=4) as log:
            await asyncio.sleep(draw.uniform(0.5, 2))
            victims = stack.by_role(roles[number % len(roles)]) or stack.by_role(processes.API_SERVER)
            processes.kill_hard([victims[0].pid])
            await asyncio.to_thread(_wait_not_ready, stack)
            async with async_client(stack) as probe:
                with pytest.raises(openai.InternalServerError) as refused:
                    await _ask_once(probe, questions(zoo)[0])
                assert refused.value.status_code == 503
                assert refused.value.code == "service_unavailable"
            recoveries.append(round(await asyncio.to_thread(stack.wait_ready), 1))
        _only_clean_errors(log)
        met += len(log.errors)
        assert processes.alive(before) == [], "a process of the killed engine lives on"
        async with async_client(stack) as client:
            await ask_all(client, questions(zoo))
    record_figures("engine_kills", {"recovery_s": recoveries, "requests_refused": met})
    assert stack.gateway_pid() == gateway
    _everything_verifies(stack)


async def _ask_once(client: openai.AsyncOpenAI, asked: Question) -> None:
    await client.completions.create(model=asked.model, prompt=list(asked.prompt.token_ids), max_tokens=1)


def _only_clean_errors(log: TrafficLog) -> None:
    """Wrong answers never; errors of the connection, or ones in OpenAI's shape that say `try again`."""
    assert log.wrong == []
    for error in log.errors:
        if isinstance(error, openai.APIStatusError):
            assert error.status_code in (500, 502, 503), error.message
            assert error.body, error.message


def _everything_verifies(stack: Stack) -> None:
    verified = stack.cli("adapter", "verify", limit_s=120)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert all(result.ok for result in stack.catalog.verify())


def _wait_not_ready(stack: Stack) -> None:
    deadline = time.monotonic() + 15
    while stack.is_ready():
        assert time.monotonic() < deadline, "the gateway still says ready 15 s after the engine was killed"
        time.sleep(0.05)


def _push_command(stack: Stack, zoo: Zoo, recipe: str, name: AdapterName) -> list[str]:
    return [*cli_argv(), "adapter", "push", str(zoo.adapter(recipe)), str(name)]


def _push_s(stack: Stack, zoo: Zoo) -> float:
    began = time.monotonic()
    command = _push_command(stack, zoo, "fleet099", AdapterName(TENANT, "whole-push"))
    subprocess.run(command, env=stack.env, check=True, capture_output=True, timeout=60)
    return time.monotonic() - began


def _killed_push(stack: Stack, zoo: Zoo, recipe: str, name: AdapterName, delay_s: float) -> int:
    pushing = subprocess.Popen(
        _push_command(stack, zoo, recipe, name), env=stack.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return pushing.wait(timeout=delay_s)
    except subprocess.TimeoutExpired:
        pushing.kill()
        return pushing.wait()


def _versions(stack: Stack, name: AdapterName) -> int:
    try:
        return len(stack.catalog.versions(name))
    except NotFound:
        return 0
