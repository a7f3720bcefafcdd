from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.adapter import (
    AdapterName,
    EngineName,
    Selector,
    VersionRef,
    check_alias,
    check_digest,
    check_segment,
    shown,
)
from manylora.errors import InvalidName

segments = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?", fullmatch=True).filter(lambda text: ".." not in text)
digests = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
numbers = st.integers(1, 999_999_999)
aliases = segments.filter(lambda text: not text.startswith("v"))
BAD_NAMES = [
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a/b/c",
    "a//b",
    "a/",
    "/a",
    "A/b",
    "a/B",
    "a b/c",
    "a/b\n",
    "a/b\0",
    "ä/b",
    "🦙/x",
    "a..b/c",
    "-a/b",
    "a-/b",
    "a\\b/c",
    "a%2fb",
    "a/" + "b" * 64,
    "x" * 10_000,
    "a/\udc80",
    "ª/b",
    "a/१",
]


@pytest.mark.parametrize("text", BAD_NAMES)
def test_bad_names_are_refused_in_one_short_line(text: str) -> None:
    for parse in (AdapterName.parse, Selector.parse, EngineName.parse):
        with pytest.raises(InvalidName) as caught:
            parse(text)
        message = str(caught.value)
        assert "\n" not in message
        assert message.isascii() or "…" in message
        assert len(message) < 400


@given(tenant=segments, name=segments)
def test_names_come_back_as_written(tenant: str, name: str) -> None:
    adapter = AdapterName(tenant, name)
    assert AdapterName.parse(str(adapter)) == adapter
    assert AdapterName.parse(name, default_tenant=tenant) == adapter
    assert Selector.parse(str(adapter)) == Selector(adapter)


@given(tenant=segments, name=segments, number=numbers, alias=aliases)
def test_selectors_come_back_as_written(tenant: str, name: str, number: int, alias: str) -> None:
    adapter = AdapterName(tenant, name)
    for selector in (Selector(adapter, number=number), Selector(adapter, alias=alias), Selector(adapter)):
        assert Selector.parse(str(selector)) == selector
        assert Selector.parse(str(selector).partition("/")[2], default_tenant=tenant) == selector


@given(tenant=segments, name=segments, number=numbers, digest=digests)
def test_engine_names_come_back_as_written(tenant: str, name: str, number: int, digest: str) -> None:
    ref = VersionRef(AdapterName(tenant, name), number, digest)
    assert EngineName.parse(ref.engine_name) == EngineName(ref.adapter, number, digest[:16])
    with pytest.raises(InvalidName):
        Selector.parse(ref.engine_name)


@given(text=st.text(max_size=300))
def test_any_text_is_read_exactly_or_refused(text: str) -> None:
    for parse in (AdapterName.parse, Selector.parse):
        with contextlib.suppress(InvalidName):
            assert str(parse(text)) == text
    with contextlib.suppress(InvalidName):
        EngineName.parse(text)


@given(text=st.text(max_size=80))
def test_a_valid_segment_is_safe_anywhere(text: str) -> None:
    try:
        check_segment(text, "name")
    except InvalidName:
        return
    assert text.isascii()
    assert not set(text) & set("/\\\0\n @%?#")
    assert text not in (".", "..")


@pytest.mark.parametrize("text", ["v1", "v999999999", "v7-0123456789abcdef", "", "live!", "Live"])
def test_aliases_that_would_confuse(text: str) -> None:
    with pytest.raises(InvalidName):
        check_alias(text)


@pytest.mark.parametrize("text", ["live", "canary", "v0", "v01", "version-2", "v"])
def test_aliases_that_are_fine(text: str) -> None:
    assert check_alias(text) == text


@pytest.mark.parametrize("text", ["a/b@", "a/b@v0", "a/b@v1@v2", "a/b@v-1", "@v1", "a/b@ v1", "a/b@V1"])
def test_selectors_that_are_no_version(text: str) -> None:
    with contextlib.suppress(InvalidName):
        assert Selector.parse(text).number is None


def test_a_name_without_a_tenant_needs_one() -> None:
    with pytest.raises(InvalidName, match="lacks a tenant"):
        AdapterName.parse("support")


@pytest.mark.parametrize("text", ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "../" + "0" * 61])
def test_digests(text: str) -> None:
    with pytest.raises(InvalidName):
        check_digest(text)
    assert check_digest("0" * 64)


@given(text=st.text(max_size=200), limit=st.integers(1, 100))
def test_shown_is_printable_and_bounded(text: str, limit: int) -> None:
    found = shown(text, limit)
    assert found.removesuffix("…").isascii()
    assert found.removesuffix("…").isprintable()
    assert len(found) <= limit + 1
