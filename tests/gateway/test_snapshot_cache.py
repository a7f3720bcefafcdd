"""Facts of one change number only."""

from __future__ import annotations

from manylora.gateway.snapshot_cache import SnapshotCache


def test_another_number_forgets_everything() -> None:
    cache: SnapshotCache[str, int] = SnapshotCache(8)
    assert cache.get(1, "a") is None
    cache.put(1, "a", 10)
    assert cache.get(1, "a") == 10
    assert cache.get(2, "a") is None and cache.get(1, "a") is None


def test_a_fact_of_an_older_number_is_dropped() -> None:
    cache: SnapshotCache[str, int] = SnapshotCache(8)
    cache.get(1, "a")
    cache.get(2, "b")
    cache.put(1, "a", 10)
    assert cache.get(2, "a") is None


def test_the_least_recently_used_goes_first() -> None:
    cache: SnapshotCache[str, int] = SnapshotCache(2)
    cache.get(1, "a")
    cache.put(1, "a", 1)
    cache.put(1, "b", 2)
    assert cache.get(1, "a") == 1
    cache.put(1, "c", 3)
    assert [cache.get(1, key) for key in "abc"] == [1, None, 3]
