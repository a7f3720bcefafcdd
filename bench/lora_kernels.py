"""What LoRA over the adapter pool adds to a decode step's matrix products: the kernels alone, on one GPU, no engine.

    PYTHONPATH=src python bench/lora_kernels.py

One CUDA graph holds 32 layers of the Llama-3.1-8B shape: the base model's products (bf16) and, after each, `add_lora`
on all seven linears. Pages lie at random places. "added" is the median time of the graph minus that of the graph
without LoRA. Decode steps are measured a second time with what else a layer computes (norms, attention over 192 tokens,
SiLU) before each product: what the kernels could hide behind is there then too. The result is JSON in
bench/results/h200-kernels.json. Needs PyTorch with CUDA, Triton and numpy only.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional

from manylora.kernels.paged_lora import (
    GROUP_TOKENS,
    MANY_TOKENS,
    DevicePlan,
    Tuning,
    add_lora,
    sums_numel,
    tile_tokens,
)
from manylora.kernels.pages import ROWS, Layout, Module
from manylora.kernels.pool import AdapterPool
from manylora.kernels.step_plan import ITEM_FIELDS, capacity, plan_step

RESULT = Path(__file__).parent / "results" / "h200-kernels.json"
LAYERS = 32
SHAPES = (
    ("qkv", 4096, (4096, 1024, 1024)),
    ("o", 4096, (4096,)),
    ("gate_up", 4096, (14336, 14336)),
    ("down", 14336, (4096,)),
)
RANKS = (8, 16, 32, 64)
ADAPTERS = 32
MAX_RANK = 64
REPEATS = 20
CASES = {
    "1 × 1": [1],
    "32 × 1": [1] * 32,
    "32 × 32": list(range(32)),
    "256 × 1": [1] * 256,
    "256 × 32": [token % 32 for token in range(256)],
    "8 prompts of 1024 × 8": [token // 1024 for token in range(8192)],
}
CONTEXT = 192
"""Tokens that attention reads, for each token of a decode step."""

WEIGHTS = 4
"""Base weights of each kind that the layers take in turn: more than the cache holds."""


def filled_pool(ranks: list[int]) -> tuple[AdapterPool, np.ndarray, np.ndarray]:
    """A pool of random numbers with an adapter of each rank at random pages; their tables and rank blocks."""
    layout = Layout.of([Module(f"{layer}.{name}", k, widths) for layer in range(LAYERS) for name, k, widths in SHAPES])
    page_bytes = ROWS * layout.columns * 2
    needed = sum(rank // ROWS for rank in ranks) * layout.entries_per_block
    pool = AdapterPool(layout, (needed + 1) * page_bytes, torch.bfloat16, "cuda")
    for first in range(1, pool.pages.shape[0], 4096):
        pool.pages[first : first + 4096].normal_(0, 0.02)
    numbers = list(range(1, needed + 1))
    random.Random(0).shuffle(numbers)  # noqa: S311 - any order will do
    lengths = np.array([rank // ROWS * layout.entries_per_block for rank in ranks])
    pool.table[:needed] = torch.tensor(numbers, dtype=torch.int32)
    tables = (np.cumsum(lengths) - lengths).astype(np.int32)
    return pool, tables, np.array([rank // ROWS for rank in ranks], np.int32)


def device_plan(of_token: list[int], tables: np.ndarray, blocks: np.ndarray) -> DevicePlan:
    """The step's plan in buffers of the size that a captured graph would have."""
    plan = plan_step(np.array(of_token, np.int32), tables, blocks, GROUP_TOKENS, tile_tokens(len(of_token)))
    groups, items = capacity(len(of_token), GROUP_TOKENS, ADAPTERS, MAX_RANK)
    all_groups, all_items = np.zeros((groups, 4), np.int32), np.zeros((items, ITEM_FIELDS), np.int32)
    all_groups[: len(plan.groups)], all_items[: len(plan.items)] = plan.groups, plan.items
    all_tiles = np.zeros((len(of_token) // GROUP_TOKENS + 1, 4), np.int32)
    all_tiles[: len(plan.tiles)] = plan.tiles
    parts = (plan.order, all_groups, all_items, all_tiles, plan.counts)
    return DevicePlan(*(torch.from_numpy(part).cuda() for part in parts))


def graph_ms(step: Callable[[], None]) -> float:
    """Median milliseconds of a CUDA graph of `step`."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(REPEATS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def layer_parts(tokens: int) -> dict[str, Callable[[], object]]:
    """What a decoding layer computes before each of its products."""
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    residual, added, gate_up = new(tokens, 4096), new(tokens, 4096), new(tokens, 2 * 14336)
    query, keys, values = new(tokens, 32, 1, 128), new(tokens, 8, CONTEXT, 128), new(tokens, 8, CONTEXT, 128)

    def norm() -> object:
        torch.add(residual, residual, out=added)
        return functional.rms_norm(added, (4096,), residual[0])

    return {
        "qkv": norm,
        "o": lambda: functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True),
        "gate_up": norm,
        "down": lambda: functional.silu(gate_up[:, :14336]) * gate_up[:, 14336:],
    }


class Step:
    """One case's step, over a pool and base weights that all cases share."""

    def __init__(self, case: str, world: World, tuning: Tuning) -> None:
        tokens = len(CASES[case])
        self._world, self._tuning = world, tuning
        self._plan = device_plan(CASES[case], world.tables, world.blocks)
        self._sums = torch.empty(sums_numel(world.pool, tokens, MAX_RANK, tuning), device="cuda")
        new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self._x = {k: new(tokens, k) for _, k, _ in SHAPES}
        self._y = {name: new(tokens, sum(widths)) for name, _, widths in SHAPES}
        self._parts = layer_parts(tokens) if tokens <= MANY_TOKENS else {}

    def run(self, lora: bool, whole_layer: bool) -> None:
        for layer in range(LAYERS):
            for nth, (name, k, _) in enumerate(SHAPES):
                if whole_layer:
                    self._parts[name]()
                torch.mm(self._x[k], self._world.weights[name][layer % WEIGHTS], out=self._y[name])
                if lora:
                    number = layer * len(SHAPES) + nth
                    add_lora(
                        self._y[name], self._x[k], number, self._world.pool, self._plan, self._sums, MAX_RANK,
                        self._tuning,
                    )  # fmt: skip

    def added(self, whole_layer: bool) -> tuple[float, float]:
        """Milliseconds of a step without LoRA, and what LoRA adds."""
        base = graph_ms(lambda: self.run(False, whole_layer))
        return round(base, 3), round(graph_ms(lambda: self.run(True, whole_layer)) - base, 3)


@dataclass(frozen=True, slots=True)
class World:
    """A pool of 32 adapters, and base weights."""

    pool: AdapterPool
    tables: np.ndarray
    blocks: np.ndarray
    weights: dict[str, list[torch.Tensor]]

    @classmethod
    def new(cls, ranks: list[int]) -> World:
        weights = {
            name: [
                torch.empty(k, sum(widths), device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
                for _ in range(WEIGHTS)
            ]
            for name, k, widths in SHAPES
        }
        return cls(*filled_pool(ranks), weights)


def measure(tuning: Tuning, cases: Sequence[str] = tuple(CASES)) -> list[dict[str, object]]:
    ranks = [RANKS[number % len(RANKS)] for number in range(ADAPTERS)]
    world = World.new(ranks)
    rows: list[dict[str, object]] = []
    for case in cases:
        step = Step(case, world, tuning)
        base, added = step.added(whole_layer=False)
        used = sorted({ranks[adapter] for adapter in CASES[case]})
        row: dict[str, object] = {"streams × adapters": case, "lora_ranks": used, "base_ms": base, "added_ms": added}
        if len(CASES[case]) <= MANY_TOKENS:
            base, added = step.added(whole_layer=True)
            row |= {"whole_layer_base_ms": base, "whole_layer_added_ms": added}
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": measure(Tuning())}
    args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
