"""Taking a request apart: what is refused, and that nothing but `model` changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_world import World
from hypothesis import given
from hypothesis import strategies as st

from manylora.gateway.problems import Refusal
from manylora.gateway.request_body import parse

BODY = b' {"a":1.50,\t"model" : "x\\u0041","big":12345678901234567890123,"m":[{"model":"q"}], "e":"\\u00e9\xc3\xa9"} '


def test_only_the_model_changes() -> None:
    body = parse(BODY)
    assert body.model == "xA"
    assert body.with_model("NEW") == BODY.replace(b'"x\\u0041"', b'"NEW"')


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"a","model":"a"}',
        b'{"model":"a","model":"b"}',
        b'{"model":12,"model":"a"}',
        b'{"model":"a","mod\\u0065l":"b"}',
        b'{"model":"a","x":1,"model":"b","y":2}',
        b'{"model":"a","b":12,"b":1}',
        b'{"model":"a","b":1,"b":12}',
        b'{"x":"","model":"a","x":"","y":{}}',
    ],
)
def test_a_field_given_twice_is_refused(raw: bytes) -> None:
    with pytest.raises(Refusal, match="more than once"):
        parse(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b'"x"', b"null", b"{}", b'{"model":null}', b'{"model":1}', b'{"model":["a"]}',
        b'{"model":"a"', b'{"model":"a"}x', b'{"model":"a","b":}', b'{"model":"a","b":NaN}', b'{"model":"a","b":[}',
        b"\xff\xfe{\x00}\x00",
        b'{"model":"\xff"}', b'{"model":"a","b":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_as_such(raw: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        parse(raw)
    assert refused.value.problem.status == 400
    assert refused.value.problem.type == "invalid_request_error"


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_names = st.text() | st.sampled_from(["model", "messages", 'mo"del', "\\", "n"])


@given(
    fields=st.dictionaries(_names, _values, max_size=5),
    model=st.text(),
    compact=st.booleans(),
    ascii_only=st.booleans(),
)
def test_another_reader_sees_the_new_model_and_the_same_rest(
    fields: dict[str, Any], model: str, compact: bool, ascii_only: bool
) -> None:
    fields = {**fields, "model": model}
    separators = (",", ":") if compact else (" , ", "\n:\t")
    raw = json.dumps(fields, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "replace")
    body = parse(raw)
    assert body.model == json.loads(raw)["model"]
    assert json.loads(body.with_model("other")) == {**json.loads(raw), "model": "other"}


@given(
    pairs=st.lists(
        st.tuples(st.sampled_from(["a", "b", "model"]), st.sampled_from(["1", "12", '"x"', "[]"])), max_size=6
    )
)
def test_two_readers_never_see_two_models(pairs: list[tuple[str, str]]) -> None:
    raw = ("{" + ",".join(f'"{name}":{value}' for name, value in [*pairs, ("model", '"x"')]) + "}").encode()
    names = [name for name, _ in pairs] + ["model"]
    if len(set(names)) == len(names):
        assert json.loads(parse(raw).with_model("y"))["model"] == "y"
    else:
        with pytest.raises(Refusal):
            parse(raw)


def test_a_huge_body_is_refused_and_the_next_request_served(world: World) -> None:
    size = world.settings.max_body_bytes
    for content in (b"x" * (size + 1), b"x" * (20 * size)):
        answer = world.post(content=content)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"

    def chunks() -> Any:
        for _ in range(8):
            yield b"x" * (size // 4)

    assert world.post(content=chunks()).status_code == 413
    assert world.chat("support", user="x" * (size - 1000)).status_code == 200


def test_a_compressed_body_is_refused(world: World) -> None:
    answer = world.post(content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415


def test_bad_json_names_the_fault(world: World) -> None:
    answer = world.post(content=b'{"model": "support",')
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "not valid JSON" in answer.json()["error"]["message"]
    assert world.engine.requests == []
