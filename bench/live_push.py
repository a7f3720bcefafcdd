"""A push while a stream runs, on the demo's real model: how soon the adapter answers, and what the stream feels of it.

    python bench/live_push.py [--rounds 15] [--models DIR]

Each round starts a stream of the base model through the gateway, pushes one of the demo's adapters under a new name
with `manylora adapter push` (a process of its own, on the same machine) or in this process, asks it at once, and
compares the stream's largest gap from the push on with its median. Every third round pushes nothing and asks an adapter
that is in memory: what the stream feels then is the other request, and the machine. The result is JSON in
bench/results/live-push.json.
"""

# The commands are this file's own.
# ruff: noqa: S603

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from manylora.adapter import AdapterName
from manylora.demo import base_model
from manylora.demo.client import Answer, Client
from manylora.demo.run import VLLM_FLAGS
from manylora.demo.server import Server
from manylora.peft_config import CONFIG_FILE
from manylora.registry.base_model import describe
from manylora.registry.catalog import Catalog
from manylora.settings import Settings
from manylora.supervisor.plan import free_port

RESULT = Path(__file__).parent / "results" / "live-push.json"
ADAPTERS = Path(__file__).parents[1] / "examples" / "adapters"
FOLDERS = ("spanish", "medical", "bank", "sql")
STREAM_TOKENS = 110
TOKENS_BEFORE = 30
STORY = "Tell me a story about a fisherman."
QUESTION = "What is the capital of France?"
KINDS = ("library", "command", "none")
"""How a round pushes."""


async def one_round(client: Client, settings: Settings, folder: str, name: str, kind: str) -> dict[str, object]:
    """Push `folder` as `name` beside a stream; the figures of the round."""
    begun = asyncio.Event()
    fresh = _unseen(ADAPTERS / folder, settings.home / "unseen")

    def watch(answer: Answer) -> None:
        if len(answer.chunk_times_s) >= TOKENS_BEFORE:
            begun.set()

    started = time.monotonic()
    stream = asyncio.create_task(
        client.ask(base_model.NAME, STORY, max_tokens=STREAM_TOKENS, ignore_eos=True, on_chunk=watch)
    )
    await begun.wait()
    pushed_at = time.monotonic()
    if kind != "none":
        await asyncio.to_thread(_push, settings, fresh, name, kind == "command")
    push_s = time.monotonic() - pushed_at
    asked = await client.ask(name, QUESTION, max_tokens=8)
    answer = await stream
    gaps = list(zip(answer.chunk_times_s[1:], answer.gaps_s(), strict=True))
    median_s = answer.median_gap_s()
    largest_s = max(gap for at, gap in gaps if started + at > pushed_at)
    return {
        "adapter": folder,
        "push": kind,
        "push_s": round(push_s, 3),
        "push_to_first_token_s": round(push_s + asked.first_token_s, 3),
        "median_gap_ms": round(1000 * median_s, 1),
        "largest_gap_before_ms": round(1000 * max(gap for at, gap in gaps if started + at <= pushed_at), 1),
        "largest_gap_ms": round(1000 * largest_s, 1),
        "gap_ratio": round(largest_s / median_s, 2),
    }


def _unseen(folder: Path, copy: Path) -> Path:
    """A copy of an adapter that no tier has seen: its dropout, which serving ignores, is another each time."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    config = json.loads((copy / CONFIG_FILE).read_text())
    (copy / CONFIG_FILE).write_text(json.dumps({**config, "lora_dropout": random.random() / 10}))  # noqa: S311
    return copy


def _push(settings: Settings, folder: Path, name: str, by_cli: bool) -> None:
    if by_cli:
        command = [sys.executable, "-m", "manylora", "adapter", "push", str(folder), name]
        subprocess.run(command, check=True, env=settings.child_env(), stdout=subprocess.DEVNULL)
        return
    with Catalog.open(settings) as catalog:
        catalog.publish(folder, AdapterName.parse(name), base_model=base_model.NAME, actor="bench")


async def measure(home: Path, models: Path, rounds: int) -> list[dict[str, object]]:
    model = base_model.ensure(models)
    env = {**os.environ, "MANYLORA_HOME": str(home), "MANYLORA_PORT": str(free_port("127.0.0.1", 0))}
    settings = Settings.from_env(env)
    with Catalog.open(settings) as catalog:
        catalog.register_base_model(describe(model, name=base_model.NAME), actor="bench")
        catalog.create_tenant("acme", actor="bench")
        key, _ = catalog.create_key("acme", actor="bench")
    server = Server.start(settings, model, base_model.NAME, VLLM_FLAGS)
    try:
        await server.wait_until_ready(lambda elapsed_s, line: None)
        figures = []
        async with Client(f"{server.origin}/v1", key) as client:
            await client.ask(base_model.NAME, STORY, max_tokens=20)
            # The first push after a start warms what every later one finds warm.
            await one_round(client, settings, FOLDERS[0], "acme/warm", "library")
            for number in range(rounds):
                kind = KINDS[number % len(KINDS)]
                name = "acme/warm" if kind == "none" else f"acme/round-{number}"
                figures.append(await one_round(client, settings, FOLDERS[number % len(FOLDERS)], name, kind))
        return figures
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.stop()


def medians(rounds: Sequence[dict[str, object]]) -> dict[str, float]:
    names = ("push_to_first_token_s", "median_gap_ms", "largest_gap_ms", "gap_ratio")
    return {name: round(statistics.median(float(str(each[name])) for each in rounds), 3) for name in names}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", type=Path, default=Path.home() / ".manylora" / "models")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="manylora-bench-") as home:
        rounds = asyncio.run(measure(Path(home), args.models, args.rounds))
    result = {
        "what": f"{base_model.NAME} on the CPU, one stream, adapters of at most 2 MB",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.machine()},
        "rounds": rounds,
        "median": {kind: medians([each for each in rounds if each["push"] == kind]) for kind in KINDS},
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
