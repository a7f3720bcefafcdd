"""When a child that died is started again: a pure decision over its history, with the times passed in."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Exponential backoff with a cap; a child that was healthy for `reset_after_s` starts again with a clean record."""

    first_delay_s: float = 0.5
    factor: float = 2.0
    max_delay_s: float = 10.0
    reset_after_s: float = 10.0


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered of a child's earlier lives."""

    failures: int = 0
    """Deaths since the child was last healthy for long."""
    was_ever_healthy: bool = False


@dataclass(frozen=True, slots=True)
class Life:
    """One run of a child; `healthy_at_s` is None when it never answered."""

    healthy_at_s: float | None
    ended_at_s: float


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again after `delay_s`."""

    delay_s: float
    history: History


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It has never worked: a wrong flag, no memory, a missing model. Trying again would only hide the reason."""


def after_death(policy: RestartPolicy, history: History, life: Life) -> Restart | GiveUp:
    """Decide what follows the end of `life`."""
    if life.healthy_at_s is None and not history.was_ever_healthy:
        return GiveUp()
    healthy_s = 0.0 if life.healthy_at_s is None else life.ended_at_s - life.healthy_at_s
    failures = 0 if healthy_s >= policy.reset_after_s else history.failures
    # The exponent is capped too: a child that fails for weeks must not overflow a float.
    delay_s = min(policy.first_delay_s * policy.factor ** min(failures, 64), policy.max_delay_s)
    return Restart(delay_s, replace(history, failures=failures + 1, was_ever_healthy=True))
