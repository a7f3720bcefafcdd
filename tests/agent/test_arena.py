"""The arena against a model of it: ranges are whose they are, and nothing of the freed ones looks like a block."""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.agent.arena import PAGE_BYTES, Arena


def test_its_size_is_whole_pages() -> None:
    assert Arena(5 * PAGE_BYTES + 4095).size_bytes == 5 * PAGE_BYTES


def test_ranges_begin_at_pages_and_are_rounded_up() -> None:
    arena = Arena(4 * PAGE_BYTES)
    assert arena.take(1) == 0
    assert arena.take(PAGE_BYTES + 1) == PAGE_BYTES
    assert arena.used_bytes == 3 * PAGE_BYTES
    assert arena.take(PAGE_BYTES + 1) is None
    assert arena.take(PAGE_BYTES) == 3 * PAGE_BYTES
    assert arena.take(1) is None
    assert arena.used_bytes == arena.size_bytes


def test_neighbours_that_are_given_back_are_one_range_again() -> None:
    arena = Arena(3 * PAGE_BYTES)
    offsets = [arena.take(PAGE_BYTES) for _ in range(3)]
    for offset in (offsets[0], offsets[2], offsets[1]):
        assert offset is not None
        arena.give_back(offset, PAGE_BYTES)
    assert arena.take(3 * PAGE_BYTES) == 0


def test_free_places_apart_are_no_range() -> None:
    arena = Arena(3 * PAGE_BYTES)
    first, _, last = (arena.take(PAGE_BYTES) for _ in range(3))
    assert first is not None
    assert last is not None
    arena.give_back(first, PAGE_BYTES)
    arena.give_back(last, PAGE_BYTES)
    assert arena.take(2 * PAGE_BYTES) is None
    assert arena.used_bytes == PAGE_BYTES


def test_others_see_the_same_memory_through_the_descriptor() -> None:
    arena = Arena(4 * PAGE_BYTES)
    other = mmap.mmap(arena.descriptor, arena.size_bytes)
    arena.view(PAGE_BYTES, 5)[:] = b"hello"
    assert other[PAGE_BYTES : PAGE_BYTES + 5] == b"hello"
    assert not os.get_inheritable(arena.descriptor)


def test_a_range_that_is_given_back_begins_with_zeros() -> None:
    arena = Arena(2 * PAGE_BYTES)
    offset = arena.take(PAGE_BYTES + 1)
    assert offset == 0
    arena.view(0, 2 * PAGE_BYTES)[:] = b"\xff" * (2 * PAGE_BYTES)
    arena.give_back(0, PAGE_BYTES + 1)
    assert bytes(arena.view(0, PAGE_BYTES)) == bytes(PAGE_BYTES)


def test_a_view_cannot_reach_beyond_its_range() -> None:
    arena = Arena(2 * PAGE_BYTES)
    view = arena.view(0, 10)
    assert len(view) == 10
    with pytest.raises(IndexError):
        view[10] = 1


@given(st.data())
def test_no_two_ranges_overlap(data: Any) -> None:
    pages = data.draw(st.integers(1, 24))
    arena = Arena(pages * PAGE_BYTES)
    taken: dict[int, int] = {}
    for step in range(data.draw(st.integers(1, 40))):
        if taken and data.draw(st.booleans()):
            offset = data.draw(st.sampled_from(sorted(taken)))
            assert bytes(arena.view(offset, 1))[0] == taken[offset] % 251
            arena.give_back(offset, taken.pop(offset))
            continue
        nbytes = data.draw(st.integers(1, 6 * PAGE_BYTES))
        offset = arena.take(nbytes)
        needed = -(-nbytes // PAGE_BYTES)
        if offset is None:
            assert needed > longest_gap(taken, pages), f"step {step}: there was room"
            continue
        places = set(range(offset // PAGE_BYTES, offset // PAGE_BYTES + needed))
        assert offset % PAGE_BYTES == 0
        assert not places & occupied(taken)
        assert max(places) < pages
        arena.view(offset, 1)[0] = nbytes % 251
        taken[offset] = nbytes
        assert arena.used_bytes == len(occupied(taken)) * PAGE_BYTES
    for offset, nbytes in taken.items():
        arena.give_back(offset, nbytes)
    assert arena.used_bytes == 0
    assert arena.take(pages * PAGE_BYTES) == 0


def occupied(taken: dict[int, int]) -> set[int]:
    """Pages in use."""
    return {
        page
        for offset, nbytes in taken.items()
        for page in range(offset // PAGE_BYTES, offset // PAGE_BYTES + -(-nbytes // PAGE_BYTES))
    }


def longest_gap(taken: dict[int, int], pages: int) -> int:
    used = occupied(taken)
    longest = run = 0
    for page in range(pages):
        run = 0 if page in used else run + 1
        longest = max(longest, run)
    return longest
