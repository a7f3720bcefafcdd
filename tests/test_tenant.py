from __future__ import annotations

import pytest

from manylora.adapter import AdapterName
from manylora.tenant import Grant

SUPPORT = AdapterName("acme", "support")


@pytest.mark.parametrize(
    ("grant", "covers"),
    [
        (Grant("globex", "acme", "support"), True),
        (Grant("globex", "acme", "*"), True),
        (Grant("globex", "acme", "sup?ort"), True),
        (Grant("globex", "acme", "[rs]upport"), True),
        (Grant("globex", "acme", "sup"), False),
        (Grant("globex", "acme", "SUPPORT"), False),
        (Grant("globex", "initech", "*"), False),
        (Grant("initech", "acme", "*"), False),
        (Grant("*", "acme", "*"), False),
        (Grant("globex", "*", "*"), False),
    ],
)
def test_a_grant_covers_what_it_names(grant: Grant, covers: bool) -> None:
    assert grant.covers("globex", SUPPORT) is covers
