"""The replay: times by hand, counts that add up, and the decisions that it shows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.errors import InvalidInput
from manylora.tiers.eviction import POLICIES
from manylora.tiers.simulation import MIB, Node, adapter_sizes, simulate
from manylora.tiers.traces import GENERATORS, Recipe, Request

SMALL = Node(
    adapter_memory_bytes=2 * MIB,
    host_memory_bytes=3 * MIB,
    lora_ranks=(1,),
    bytes_per_lora_rank=MIB,
    host_bytes_per_s=2.0 * MIB,
    disk_bytes_per_s=1.0 * MIB,
    copy_latency_s=0.0,
    read_latency_s=0.0,
    decode_tokens_per_s=1.0,
    patience_s=100.0,
)
"""An adapter takes 1 MiB: 1 s to read, 0.5 s to copy; two fit in VRAM and three in host RAM."""


def asks(*pairs: tuple[float, str], busy_s: int = 1) -> list[Request]:
    return [Request(time, "t", adapter, 0, busy_s) for time, adapter in pairs]


def test_a_cold_a_shared_and_a_warm_request() -> None:
    outcome = simulate(asks((0, "a"), (1, "a"), (5, "a")), SMALL, "lru")
    assert list(outcome.waits_s) == [0.0, 0.5, 1.5]
    assert (outcome.vram.asked, outcome.vram.hits, outcome.vram.loads) == (3, 1, 1)
    assert (outcome.host.asked, outcome.host.hits, outcome.host.loads) == (1, 0, 1)
    assert outcome.vram.bytes_in == outcome.host.bytes_in == MIB


def test_reads_come_one_after_the_other() -> None:
    outcome = simulate(asks((0, "a"), (0, "b")), SMALL, "lru")
    assert list(outcome.waits_s) == [1.5, 2.5]


def test_what_left_vram_comes_back_from_host_ram() -> None:
    outcome = simulate(asks((0, "a"), (10, "b"), (20, "c"), (30, "a")), SMALL, "lru")
    assert list(outcome.waits_s) == [0.5, 1.5, 1.5, 1.5]
    assert (outcome.vram.evictions, outcome.vram.reloads) == (2, 1)
    assert (outcome.host.hits, outcome.host.evictions) == (1, 0)


def test_a_reload_long_after_is_no_thrash() -> None:
    outcome = simulate(asks((0, "a"), (10, "b"), (20, "c"), (300, "a")), SMALL, "lru")
    assert (outcome.vram.evictions, outcome.vram.reloads) == (2, 0)


def test_a_request_waits_for_a_busy_tier() -> None:
    outcome = simulate([*asks((0, "a"), (0, "b"), busy_s=20), *asks((5, "c"))], SMALL, "lru")
    assert list(outcome.waits_s) == [1.5, 2.5, 21.5 - 5 + 1.5]


def test_patience_ends_a_wait_behind_hot_ones() -> None:
    hot = [Request(float(second), "t", adapter, 0, 4) for second in range(100) for adapter in "ab"]
    trace = sorted([*hot, Request(10.5, "t", "cold", 0, 4)], key=lambda request: request.time)
    patient = simulate(trace, SMALL, "lru")
    drained = simulate(trace, Node(**{**_fields(SMALL), "patience_s": 2.0}), "lru")
    assert patient.percentile_s(1.0) > 80
    assert drained.percentile_s(1.0) < 12


def _fields(node: Node) -> dict[str, object]:
    return {name: getattr(node, name) for name in Node.__dataclass_fields__}


def test_percentiles() -> None:
    outcome = simulate(asks(*((float(10 * n), "a") for n in range(100))), SMALL, "lru")
    assert (outcome.percentile_s(0.5), outcome.percentile_s(0.99), outcome.percentile_s(1.0)) == (0.0, 0.0, 1.5)
    assert outcome.mean_s == pytest.approx(0.015)


def test_ranks_go_round_over_the_names() -> None:
    sizes = adapter_sizes(asks((0, "b"), (1, "a"), (2, "c")), Node(lora_ranks=(8, 64), bytes_per_lora_rank=10))
    assert sizes == {"t/a": 80, "t/b": 640, "t/c": 80}


def test_an_adapter_that_fits_in_no_tier_is_refused() -> None:
    with pytest.raises(InvalidInput, match="does not fit"):
        simulate(asks((0, "a")), Node(host_memory_bytes=1), "lru")


requests = st.lists(st.tuples(st.integers(0, 40), st.sampled_from("abcdef"), st.integers(1, 20)), min_size=1)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40)
@given(made=requests)
def test_everybody_is_served_and_the_counts_add_up(policy: str, made: list[tuple[int, str, int]]) -> None:
    trace = sorted((Request(float(at), "t", key, 0, busy) for at, key, busy in made), key=lambda each: each.time)
    outcome = simulate(trace, Node(**{**_fields(SMALL), "patience_s": 3.0}), policy)
    assert len(outcome.waits_s) == outcome.vram.asked == len(trace)
    assert outcome.host.asked == outcome.vram.loads == outcome.vram.bytes_in // MIB
    assert outcome.host.loads == outcome.host.asked - outcome.host.hits
    for tier, places in ((outcome.vram, 2), (outcome.host, 3)):
        assert tier.loads - places <= tier.evictions <= tier.loads
        assert tier.reloads <= tier.evictions


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_replay_gives_the_same_twice(kind: str) -> None:
    trace = GENERATORS[kind](Recipe(adapters=50, requests=500))
    node = Node(adapter_memory_bytes=1 << 30, host_memory_bytes=4 << 30)
    assert simulate(trace, node, "gdsf") == simulate(trace, node, "gdsf")
