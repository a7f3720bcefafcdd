from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.registry.aliases import REMOVED, ROLLBACK, SET, rollback_target
from manylora.registry.records import AliasChange

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def changes(*steps: int | str) -> list[AliasChange]:
    """Numbers are promotions, "<n" are rollbacks to n, "x" is the removal."""
    found = []
    for step in steps:
        if step == "x":
            found.append(AliasChange("live", None, 1, REMOVED, NOW, "t"))
        elif isinstance(step, str):
            found.append(AliasChange("live", int(step[1:]), 1, ROLLBACK, NOW, "t"))
        else:
            found.append(AliasChange("live", step, None, SET, NOW, "t"))
    return found


@pytest.mark.parametrize(
    ("steps", "ready", "target"),
    [
        ([], {1}, None),
        ([1], {1}, None),
        ([1, 2], {1, 2}, 1),
        ([1, 2, 3], {1, 2, 3}, 2),
        ([1, 2, 3, "<2"], {1, 2, 3}, 1),
        ([1, 2, 3, "<2", "<1"], {1, 2, 3}, None),
        ([1, 2, "<1", 3], {1, 2, 3}, 1),
        ([1, 2, 1], {1, 2}, 2),
        ([1, 2, 1, "<2"], {1, 2}, 1),
        ([1, 2, 3], {1, 3}, 1),
        ([1, 2, 1], {1}, None),
        ([1, 2, 3, "<1"], {1, 3}, None),
        ([1, 2, "x", 3], {1, 2, 3}, None),
        ([1, 2, "x", 3, 4], {1, 2, 3, 4}, 3),
    ],
)
def test_rollback_target(steps: list[int | str], ready: set[int], target: int | None) -> None:
    assert rollback_target(changes(*steps), ready) == target


@given(numbers=st.lists(st.integers(1, 5), max_size=12), ready=st.sets(st.integers(1, 5)))
def test_rolling_back_again_and_again_ends(numbers: list[int], ready: set[int]) -> None:
    promotions = [n for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1]]
    history = changes(*promotions)
    for _ in range(len(promotions) + 1):
        present = history[-1].number if history else None
        target = rollback_target(history, ready)
        if target is None:
            return
        assert target in ready
        assert target != present
        history += changes(f"<{target}")
    pytest.fail("never ended")
