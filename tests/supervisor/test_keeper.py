"""What is said of a child that was killed while it started: memory is blamed only where the kernel counted it."""

from __future__ import annotations

import pytest

from manylora.supervisor import process_tree
from manylora.supervisor.child import describe_exit
from manylora.supervisor.keeper import killed_hint


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (3, 4, "had no memory left and killed it"),
        (3, 3, "did not kill it for lack of memory"),
        (None, 3, "perhaps the system for lack of memory"),
        (3, None, "perhaps the system for lack of memory"),
    ],
)
def test_the_hint_for_a_killed_child(
    monkeypatch: pytest.MonkeyPatch, before: int | None, after: int | None, words: str
) -> None:
    monkeypatch.setattr(process_tree, "oom_kills", lambda: after)
    assert words in killed_hint(before)


def test_exits_in_words() -> None:
    assert describe_exit(1) == "ended with exit code 1"
    assert describe_exit(137) == "was ended by signal 9"
    assert describe_exit(-9) == "was ended together with its guard by signal 9"
