"""The decision about a restart."""

from __future__ import annotations

import pytest

from manylora.supervisor.restart import GiveUp, History, Life, Restart, RestartPolicy, after_death

POLICY = RestartPolicy(first_delay_s=1, factor=2, max_delay_s=10, reset_after_s=60)


def delays(history: History, *lives: Life) -> list[float]:
    found = []
    for life in lives:
        decision = after_death(POLICY, history, life)
        assert isinstance(decision, Restart)
        history = decision.history
        found.append(decision.delay_s)
    return found


def test_a_child_that_was_never_healthy_is_not_started_again() -> None:
    assert after_death(POLICY, History(), Life(None, 5)) == GiveUp()


def test_a_child_that_was_healthy_once_is_always_started_again() -> None:
    history = History(was_ever_healthy=True)
    assert delays(history, *[Life(None, 5)] * 6) == [1, 2, 4, 8, 10, 10]


def test_short_healthy_lives_count_as_failures() -> None:
    assert delays(History(), Life(10, 11), Life(20, 21), Life(30, 31)) == [1, 2, 4]


def test_a_long_healthy_life_clears_the_record() -> None:
    assert delays(History(), Life(0, 1), Life(2, 3), Life(10, 70), Life(80, 81)) == [1, 2, 1, 2]


@pytest.mark.parametrize("failures", [100, 10_000, 10**9])
def test_the_delay_stays_capped_for_ever(failures: int) -> None:
    assert delays(History(failures, was_ever_healthy=True), Life(None, 5)) == [10]
