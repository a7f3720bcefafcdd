"""Which adapter should go: the eviction policies over made-up traces, and what draining busy adapters costs.

    python bench/eviction_policies.py [--seeds 3] [--requests 30000]

Replays traces with `manylora.tiers.simulation`, no engine and no GPU, in about four minutes on one core; `manylora
simulate` does the same for one trace. Prints Markdown tables and writes bench/results/eviction-policies.json. Each
figure is the mean over the seeds; p99 and the longest wait are the largest.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from manylora.tiers.eviction import POLICIES
from manylora.tiers.simulation import GIB, Node, Outcome, simulate
from manylora.tiers.traces import GENERATORS, Recipe, Request

RESULT = Path(__file__).parent / "results" / "eviction-policies.json"
TRACES = (
    ("zipf", 0.8),
    ("zipf", 1.0),
    ("zipf", 1.2),
    ("bursty", 0.8),
    ("bursty", 1.0),
    ("bursty", 1.2),
    ("shifting", 1.0),
)
"""The last: Zipf, with other adapters the popular ones after each quarter of the trace."""
NODES = ((16, 64), (24, 40))
"""Adapter memory and host memory in GiB: adapters that nearly fit in host RAM, and that do not."""
DRAINS = ((math.inf, 0.0), (5.0, 1.0), (5.0, 0.5), (5.0, 0.125), (5.0, 0.0), (2.0, 0.125), (10.0, 0.125))
"""Patience in seconds, and the share of memory that is drained at a time."""
CROWDED_GIB = 6
"""Adapter memory that the running requests alone would fill."""

Row = dict[str, object]


def traces(kind: str, skew: float, requests: int, seeds: int) -> list[list[Request]]:
    make = (GENERATORS | {"shifting": shifting})[kind]
    return [make(Recipe(skew=skew, requests=requests, seed=seed)) for seed in range(seeds)]


def shifting(recipe: Recipe) -> list[Request]:
    made: list[Request] = []
    for quarter in range(4):
        part = GENERATORS["zipf"](replace(recipe, requests=recipe.requests // 4, seed=4 * recipe.seed + quarter))
        start_s = made[-1].time if made else 0.0
        made += [replace(request, time=request.time + start_s) for request in part]
    return made


def row(outcomes: Sequence[Outcome]) -> Row:
    return {
        "vram_hit_rate": round(fmean(outcome.vram.hit_rate for outcome in outcomes), 4),
        "host_hit_rate": round(fmean(outcome.host.hit_rate for outcome in outcomes), 4),
        "vram_gib_in": round(fmean(outcome.vram.bytes_in for outcome in outcomes) / GIB, 1),
        "host_gib_in": round(fmean(outcome.host.bytes_in for outcome in outcomes) / GIB, 1),
        "vram_evictions": round(fmean(outcome.vram.evictions for outcome in outcomes)),
        "vram_reloads": round(fmean(outcome.vram.reloads for outcome in outcomes)),
        "wait_mean_ms": round(1000 * fmean(outcome.mean_s for outcome in outcomes), 2),
        "wait_p50_ms": round(1000 * fmean(outcome.percentile_s(0.5) for outcome in outcomes), 2),
        "wait_p99_ms": round(1000 * max(outcome.percentile_s(0.99) for outcome in outcomes), 1),
        "wait_max_ms": round(1000 * max(outcome.percentile_s(1.0) for outcome in outcomes), 1),
    }


def policies(requests: int, seeds: int) -> Iterator[Row]:
    for kind, skew in TRACES:
        made = traces(kind, skew, requests, seeds)
        for adapter_gib, host_gib in NODES:
            node = Node(adapter_memory_bytes=adapter_gib * GIB, host_memory_bytes=host_gib * GIB)
            for policy in POLICIES:
                head: Row = {"trace": kind, "skew": skew, "adapter_gib": adapter_gib, "host_gib": host_gib}
                yield head | {"policy": policy} | row([simulate(trace, node, policy) for trace in made])


def drains(requests: int, seeds: int) -> Iterator[Row]:
    made = traces("zipf", 1.0, requests, seeds)
    for patience_s, share in DRAINS:
        node = Node(adapter_memory_bytes=CROWDED_GIB * GIB, patience_s=patience_s, drain_share=share)
        head: Row = {"patience_s": patience_s if patience_s < math.inf else None, "drain_share": share}
        yield head | row([simulate(trace, node, "lfu") for trace in made])


def told(rows: Iterator[Row]) -> list[Row]:
    """Collect rows, printing each as a line of a table."""
    found: list[Row] = []
    for each in rows:
        if not found:
            print("| " + " | ".join(each) + " |\n|" + " --- |" * len(each))
        print("| " + " | ".join(map(str, each.values())) + " |", flush=True)
        found.append(each)
    return found


def ratios(rows: list[Row]) -> dict[str, float]:
    """Geometric mean, over the traces, of each policy's mean wait to the best policy's."""
    cells: dict[tuple[object, ...], dict[str, float]] = {}
    for each in rows:
        where = tuple(each[name] for name in ("trace", "skew", "adapter_gib"))
        cells.setdefault(where, {})[str(each["policy"])] = float(str(each["wait_mean_ms"]))
    shares = {policy: [cell[policy] / min(cell.values()) for cell in cells.values()] for policy in POLICIES}
    return {policy: round(math.exp(fmean(map(math.log, found))), 3) for policy, found in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=30_000)
    args = parser.parse_args()
    compared = told(policies(args.requests, args.seeds))
    means = ratios(compared)
    print("mean wait over the best policy's, geometric mean:", means)
    drained = told(drains(args.requests // 3, args.seeds))
    result = {"requests": args.requests, "seeds": args.seeds, "policies": compared, "ratio": means, "drains": drained}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
