"""Policies: who is worth keeping, and that no victim is pinned or in vain."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.tiers.eviction import DEFAULT_POLICY, GDSF, LFU, LRU, POLICIES, Entry, Policy, fewest

every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
sizes = st.lists(st.integers(1, 50), min_size=1, max_size=12)


def entry(key: str, size_bytes: int = 10, load_s: float = 1.0) -> Entry:
    return Entry(key, size_bytes, load_s)


def filled(policy: Policy, *entries: Entry) -> Policy:
    for time, each in enumerate(entries):
        policy.add(each)
        policy.use(each.key, float(time))
    return policy


def keys(victims: tuple[Entry, ...] | None) -> list[str] | None:
    return None if victims is None else [victim.key for victim in victims]


def test_the_default_is_one_of_them() -> None:
    assert DEFAULT_POLICY in POLICIES


def test_lru_takes_who_was_used_longest_ago() -> None:
    policy = filled(LRU(), entry("a"), entry("b"), entry("c"))
    policy.use("a", 3.0)
    assert keys(policy.victims(15, set(), 4.0)) == ["b", "c"]


def test_two_uses_at_one_moment_have_an_order() -> None:
    policy = filled(LRU(), entry("a"), entry("b"))
    policy.use("b", 5.0)
    policy.use("a", 5.0)
    assert keys(policy.victims(1, set(), 5.0)) == ["b"]


def test_lfu_takes_the_least_used_and_lets_old_fame_fade() -> None:
    policy = filled(LFU(half_life_s=10.0), entry("star"), entry("new"))
    for _ in range(7):
        policy.use("star", 1.0)
    assert keys(policy.victims(1, set(), 2.0)) == ["new"]
    policy.use("new", 60.0)
    assert keys(policy.victims(1, set(), 60.0)) == ["star"]


def test_fame_outlives_a_stay() -> None:
    policy = filled(LFU(), entry("a"), entry("b"))
    for _ in range(3):
        policy.use("a", 2.0)
    policy.remove("a", evicted=True)
    policy.use("b", 3.0)
    policy.add(entry("a"))
    policy.use("a", 4.0)
    assert keys(policy.victims(1, set(), 4.0)) == ["b"]


def test_lfu_remembers_a_bounded_number_of_adapters() -> None:
    policy = LFU(remembered=10)
    for number in range(100):
        policy.add(entry(f"{number}"))
        policy.use(f"{number}", float(number))
        policy.remove(f"{number}", evicted=True)
    assert len(policy._fame) <= 11


def test_gdsf_prefers_small_and_dear_ones() -> None:
    policy = filled(GDSF(), entry("large", 100), entry("small", 10), entry("dear", 100, load_s=50.0))
    assert [each.key for each in policy.ordered(["small", "dear", "large"], 3.0)] == ["large", "small", "dear"]


def test_gdsf_clock_rises_to_what_was_evicted() -> None:
    """Cherkasova's rule, by hand: priority = clock + frequency × cost / size."""
    policy = filled(GDSF(), entry("a", 1), entry("b", 1))
    for _ in range(4):
        policy.use("a", 2.0)
    assert (policy.worth("a", 2.0), policy.worth("b", 2.0)) == (5.0, 1.0)
    policy.remove("b", evicted=True)
    policy.add(entry("c", 1))
    policy.use("c", 3.0)
    assert policy.worth("c", 3.0) == 2.0


def test_a_removal_that_is_no_eviction_leaves_the_clock() -> None:
    policy = filled(GDSF(), entry("a", 1))
    policy.remove("a", evicted=False)
    policy.add(entry("b", 1))
    assert policy.worth("b", 1.0) == 0.0


@every_policy
def test_ties_go_by_name_and_asking_changes_nothing(make: Callable[[], Policy]) -> None:
    policy = make()
    for key in "cab":
        policy.add(entry(key))
    first = policy.victims(20, set(), 1.0)
    assert first == policy.victims(20, set(), 1.0)
    if make is not LRU:
        assert keys(first) == ["a", "b"]


@every_policy
@given(data=st.data(), sizes=sizes, needed=st.integers(0, 400))
def test_victims_are_enough_never_pinned_and_none_in_vain(
    make: Callable[[], Policy], data: st.DataObject, sizes: list[int], needed: int
) -> None:
    policy = filled(make(), *(entry(str(number), size) for number, size in enumerate(sizes)))
    pinned = data.draw(st.sets(st.sampled_from([str(number) for number in range(len(sizes))])))
    victims = policy.victims(needed, pinned, 100.0)
    free = sum(size for number, size in enumerate(sizes) if str(number) not in pinned)
    assert (victims is None) == (free < needed)
    if victims is not None:
        freed = sum(victim.size_bytes for victim in victims)
        assert freed >= needed
        assert not pinned & {victim.key for victim in victims}
        assert all(freed - victim.size_bytes < needed for victim in victims)


def test_a_large_victim_makes_small_ones_needless() -> None:
    assert keys(fewest([entry("a", 2), entry("b", 3), entry("c", 7)], 6)) == ["c"]
    assert keys(fewest([entry("a", 2), entry("b", 3)], 0)) == []


def test_the_engine_may_import_the_decisions() -> None:
    """Nothing but the standard library comes with them into vLLM's processes."""
    script = (
        "import sys\nbefore = set(sys.modules)\nimport manylora.tiers.admission\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert new - sys.stdlib_module_names <= {'manylora'}, new"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
