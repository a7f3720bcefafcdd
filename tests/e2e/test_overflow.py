"""Faults of an engine that must not reach others: overflowing adapters, and seeds of prompts read in several steps."""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from harness.asking import ask, async_client, question
from harness.recipes import BASE_NAME, HIDDEN, LAYERS
from harness.stack import TENANT, Stack, StackHolder, create_stack
from harness.zoo import BASE, Zoo

LORA_RANK = 8
IGNORE_EOS = {"ignore_eos": True}
BLOCKS = 24
"""So few that every block has been the overflowing adapter's before others use it."""
VALUE_ROWS = 64
BITE = 16
"""Tokens of a prompt that are read in a step."""


@pytest.fixture(scope="module")
def half_stack(holder: StackHolder, zoo: Zoo) -> Iterator[Stack]:
    """An engine in float16, where weights overflow that are small enough for both checks of weights."""
    holder.stopped()
    flags = ("--dtype", "float16", "--num-gpu-blocks-override", str(BLOCKS))
    stack = create_stack(zoo, *flags, "--long-prefill-token-threshold", str(BITE))
    try:
        stack.start()
        yield stack
    finally:
        stack.end()


async def test_overflow_stays_with_its_adapter(half_stack: Stack, zoo: Zoo, tmp_path: Path) -> None:
    half_stack.publish("r4")
    half_stack.publish_folder(_overflowing(zoo, tmp_path / "overflowing"), f"{TENANT}/overflowing")
    others = [question(name, prompt) for name in (BASE, "r4") for prompt in zoo.group("short")]
    async with async_client(half_stack) as client:
        before = [(await ask(client, asked)).token_ids for asked in others]
        for number in range(3 * BLOCKS):
            # Each begins differently, so that none finds its blocks in the prefix cache.
            await _ask_overflowing(client, [zoo.alphabet[number], *zoo.alphabet[:200]])
        assert [(await ask(client, asked)).token_ids for asked in others] == before


async def test_a_seed_with_a_prompt_that_is_read_in_several_steps(half_stack: Stack, zoo: Zoo) -> None:
    """vLLM's CPU engine died of it, and everybody's requests with it."""
    engine = half_stack.engine_pids()
    async with async_client(half_stack) as client:

        async def sampled(start: int, seed: int) -> str:
            prompt = [zoo.alphabet[start], *zoo.alphabet[: 5 * BITE]]
            reply = await client.completions.create(
                model=BASE_NAME, prompt=prompt, max_tokens=12, temperature=1.0, seed=seed
            )
            return reply.choices[0].text

        stream = await client.completions.create(
            model=BASE_NAME, prompt=[zoo.alphabet[7]], max_tokens=300, temperature=0, stream=True, extra_body=IGNORE_EOS
        )
        texts = await asyncio.gather(*(sampled(start, seed) for start in (1, 2) for seed in (5, 6)))
        chunks = [chunk async for chunk in stream]
        assert len(chunks) >= 300
        assert texts == [await sampled(start, seed) for start in (1, 2) for seed in (5, 6)]
        assert len(set(texts)) == len(texts)
    assert half_stack.engine_pids() == engine


async def _ask_overflowing(client: openai.AsyncOpenAI, prompt: list[int]) -> None:
    await client.completions.create(model=f"{TENANT}/overflowing", prompt=prompt, max_tokens=2, temperature=0)


def _overflowing(zoo: Zoo, folder: Path) -> Path:
    """An adapter of `v_proj` that multiplies its input by up to 8000: beyond what float16 holds."""
    shutil.copytree(zoo.adapter("r4"), folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config.update(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=["v_proj"])
    (folder / "adapter_config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    data = b""
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        for matrix, shape in (("lora_A", (LORA_RANK, HIDDEN)), ("lora_B", (VALUE_ROWS, LORA_RANK))):
            values = struct.pack("<f", 30.0) * (shape[0] * shape[1])
            header[f"{name}.{matrix}.weight"] = {
                "dtype": "F32", "shape": shape, "data_offsets": (len(data), len(data) + len(values)),
            }  # fmt: skip
            data += values
    encoded = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return folder
