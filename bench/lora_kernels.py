"""What LoRA over the adapter pool adds to a decode step's matrix products: the kernels alone, on one GPU, no engine.

    PYTHONPATH=src python bench/lora_kernels.py

One CUDA graph holds 32 layers of the Llama-3.1-8B shape: the base model's products (bf16) and, after each, `add_lora`
on all seven linears. Pages lie at random places. "added" is the median time of the graph minus that of the graph
without LoRA. The result is JSON in bench/results/h200-kernels.json. Needs PyTorch with CUDA, Triton and numpy only.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from manylora.kernels.paged_lora import GROUP_TOKENS, DevicePlan, Tuning, add_lora, sums_numel, tile_tokens
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


def measure(tuning: Tuning, cases: Sequence[str] = tuple(CASES)) -> list[dict[str, object]]:
    ranks = [RANKS[number % len(RANKS)] for number in range(ADAPTERS)]
    pool, tables, blocks = filled_pool(ranks)
    weights = {
        name: [
            torch.empty(k, sum(widths), device="cuda", dtype=torch.bfloat16).normal_(0, 0.02) for _ in range(WEIGHTS)
        ]
        for name, k, widths in SHAPES
    }
    rows: list[dict[str, object]] = []
    for case in cases:
        of_token = CASES[case]
        tokens = len(of_token)
        plan = device_plan(of_token, tables, blocks)
        sums = torch.empty(sums_numel(pool, tokens, MAX_RANK, tuning), device="cuda")
        x = {k: torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16) for _, k, _ in SHAPES}
        y = {name: torch.zeros(tokens, sum(widths), device="cuda", dtype=torch.bfloat16) for name, _, widths in SHAPES}

        def step(lora: bool) -> None:
            for layer in range(LAYERS):
                for nth, (name, k, _) in enumerate(SHAPES):
                    torch.mm(x[k], weights[name][layer % WEIGHTS], out=y[name])  # noqa: B023 - called in this turn only
                    if lora:
                        number = layer * len(SHAPES) + nth
                        add_lora(y[name], x[k], number, pool, plan, sums, MAX_RANK, tuning)  # noqa: B023

        base = graph_ms(lambda: step(lora=False))
        both = graph_ms(lambda: step(lora=True))
        used = sorted({ranks[adapter] for adapter in of_token})
        row: dict[str, object] = {"streams × adapters": case, "lora_ranks": used}
        row |= {"base_ms": round(base, 3), "added_ms": round(both - base, 3)}
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
