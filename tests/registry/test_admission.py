from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.adapter import AdapterName, Selector
from manylora.errors import NotFound
from manylora.registry.admission import takes_canary
from manylora.registry.catalog import Catalog

SUPPORT = AdapterName("acme", "support")


@pytest.fixture
def served(catalog: Catalog, make: Callable[..., Path]) -> Catalog:
    """acme/support with versions 1 (live), 2 and 3 (retired), and acme/secret."""
    for fill in (1, 2, 3):
        catalog.publish(make(fill=fill), SUPPORT, base_model="tiny-base", actor="me")
    catalog.retire_version(SUPPORT, 3, actor="me")
    catalog.publish(make(fill=4), AdapterName("acme", "secret"), base_model="tiny-base", actor="me")
    return catalog


def number(catalog: Catalog, text: str, tenant: str = "acme", sticky: str = "") -> int:
    return catalog.resolve(tenant, Selector.parse(text, default_tenant="acme"), sticky=sticky).ref.number


def test_names_numbers_and_aliases(served: Catalog) -> None:
    served.set_alias(SUPPORT, "next", 2, actor="me")
    assert number(served, "support") == 1
    assert number(served, "acme/support") == 1
    assert number(served, "support@v2") == 2
    assert number(served, "support@next") == 2
    assert number(served, "support@live") == 1


def test_absent_retired_and_forbidden_sound_the_same(served: Catalog) -> None:
    served.remove(AdapterName("acme", "secret"), actor="me")
    wordings = set()
    for tenant, text in [
        ("acme", "support@v3"),
        ("acme", "support@v9"),
        ("acme", "support@nope"),
        ("acme", "support@canary"),
        ("acme", "absent"),
        ("acme", "secret"),
        ("acme", "nobody/x"),
        ("globex", "support"),
        ("globex", "support@v1"),
        ("nobody", "support"),
        ("", "support"),
    ]:
        selector = Selector.parse(text, default_tenant="acme")
        with pytest.raises(NotFound) as caught:
            served.resolve(tenant, selector)
        assert caught.value.hint == ""
        wordings.add(caught.value.message.replace(f"`{selector}`", "X"))
    assert wordings == {"The model X does not exist or you do not have access to it."}


def test_grants_open_what_they_name(served: Catalog) -> None:
    served.grant("globex", "acme", "sup*", actor="me")
    assert number(served, "support", "globex") == 1
    with pytest.raises(NotFound):
        number(served, "secret", "globex")
    assert [str(info.name) for info in served.visible("globex")] == ["acme/support"]
    assert [str(info.name) for info in served.visible("acme")] == ["acme/secret", "acme/support"]
    assert served.visible("nobody") == []
    served.revoke_grant("globex", "acme", "sup*", actor="me")
    with pytest.raises(NotFound):
        number(served, "support", "globex")


def test_the_canary_gets_its_share_and_keeps_its_callers(served: Catalog) -> None:
    served.set_canary(SUPPORT, 2, 0.25, actor="me")
    first = {caller: number(served, "support", sticky=caller) for caller in map(str, range(60))}
    assert set(first.values()) == {1, 2}
    assert all(number(served, "support", sticky=caller) == found for caller, found in first.items())
    assert number(served, "support@live", sticky="x") == 1
    assert number(served, "support@canary", sticky="x") == 2
    served.set_canary(SUPPORT, 2, 1.0, actor="me")
    assert {number(served, "support") for _ in range(10)} == {2}
    served.set_canary(SUPPORT, 2, 0.0, actor="me")
    assert {number(served, "support") for _ in range(10)} == {1}


def test_shares_are_close_to_the_weight() -> None:
    callers = [f"caller-{index}" for index in range(4000)]
    for weight in (0.0, 0.05, 0.5, 1.0):
        share = sum(takes_canary(caller, SUPPORT, 2, weight) for caller in callers) / len(callers)
        assert abs(share - weight) < 0.03
    by_chance = sum(takes_canary("", SUPPORT, 2, 0.5) for _ in range(2000)) / 2000
    assert abs(by_chance - 0.5) < 0.08


@given(sticky=st.text(min_size=1), low=st.floats(0, 1), high=st.floats(0, 1))
def test_a_growing_canary_never_loses_a_caller(sticky: str, low: float, high: float) -> None:
    low, high = sorted((low, high))
    assert takes_canary(sticky, SUPPORT, 2, high) or not takes_canary(sticky, SUPPORT, 2, low)
    assert takes_canary(sticky, SUPPORT, 2, 1.0)
    assert not takes_canary(sticky, SUPPORT, 2, 0.0)


@given(sticky=st.text(alphabet=st.characters(categories=["Cs", "L"]), min_size=1))
def test_any_text_is_a_caller(sticky: str) -> None:
    takes_canary(sticky, SUPPORT, 1, 0.5)
