"""The model's name in answers: replaced at the top, nowhere else, whatever the chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.gateway.answer import EventStream, Naming
from manylora.gateway.engine_errors import EngineFailure, Scrubber, problem_from
from manylora.gateway.problems import Refusal

ENGINE = "acme/support@v7-3f9c2a1b0d4e5f60"
ASKED = "support"
NAMING = Naming(ENGINE, ASKED, strict=True)
SCRUBBER = Scrubber(ENGINE, ASKED, (Path("/srv/manylora/disk"),))


def stream() -> EventStream:
    return EventStream(NAMING, SCRUBBER)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps({"model": ENGINE, **fields}, ensure_ascii=False).encode() + b"\n\n"


def payloads(events: bytes) -> list[dict[str, object]]:
    return [
        json.loads(part.removeprefix(b"data: ")) for part in events.split(b"\n\n") if part not in (b"", b"data: [DONE]")
    ]


TRICKY = f'"model":"{ENGINE}" data: {{"model": "{ENGINE}"}}\n\ndata: [DONE]\n\n \\" é🦙 \u2028'


def test_text_that_looks_like_the_field_is_left_alone() -> None:
    call = {"function": {"name": "f", "arguments": json.dumps({"model": ENGINE})}}
    choices = [{"delta": {"content": TRICKY, "tool_calls": [call]}, "model": ENGINE}]
    out = payloads(stream().feed(event(choices=choices)))
    assert out == [{"model": ASKED, "choices": choices}]


@given(st.lists(st.text(), max_size=6), st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_any_chunks_give_the_same_events(texts: list[str], sizes: list[int]) -> None:
    source = (
        b": ping\n\n" + b"".join(event(choices=[{"text": text}]) for text in [*texts, TRICKY]) + b"data: [DONE]\n\n"
    )
    whole, chunked = stream(), stream()
    expected = whole.feed(source)
    out, position, turn = b"", 0, 0
    while position < len(source):
        size = sizes[turn % len(sizes)]
        out += chunked.feed(source[position : position + size])
        position, turn = position + size, turn + 1
    assert out == expected and chunked.done
    assert [part["model"] for part in payloads(out.removeprefix(b": ping\n\n"))] == [ASKED] * (len(texts) + 1)


_PIECES = st.sampled_from(
    [b"data: ", b"data:", b"\n", b"\n\n", b"\r\n\r\n", b"\r", b"x", b": ping", b"[DONE]", event()[:-2], event(), b"{"]
)


@given(st.lists(st.lists(_PIECES, max_size=6), max_size=6))
def test_the_usual_form_is_no_other_language(chunks: list[list[bytes]]) -> None:
    quick, slow = stream(), stream()
    for chunk in map(b"".join, chunks):
        assert quick.feed(chunk) == slow._split(chunk)
        assert (quick.done, quick.failed) == (slow.done, slow.failed)
        if quick.failed is not None:
            return


def test_an_engine_may_spell_the_name_otherwise() -> None:
    escaped = json.dumps(ENGINE).replace("/", "\\/").encode()
    restored, _ = NAMING.restore(b'{"model": ' + escaped + b"}")
    assert json.loads(restored) == {"model": ASKED}
    with pytest.raises(Refusal):
        NAMING.restore(b'{"model": ' + escaped.replace(b"v7", b"v8") + b"}")
    twice = b'{"model":"%s","model":"Tiny-Base"}' % ENGINE.encode()
    with pytest.raises(Refusal):
        NAMING.restore(twice)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_other_forms_of_events(end: bytes) -> None:
    half = json.dumps({"model": ENGINE, "n": 1}).encode()
    source = end.join([b"event: x", b"id: 7", b"data:" + half[:1], b"data: " + half[1:], b"", b""])
    out = stream().feed(source)
    assert out == b'event: x\nid: 7\ndata: {"model":"support","n":1}\n\n'


def test_events_without_a_model_and_half_events() -> None:
    half = stream()
    assert half.feed(b'data: {"usage":1}\n\ndata: {"model"') == b'data: {"usage":1}\n\n'
    assert not half.done


@pytest.mark.parametrize("model", ["Tiny-Base", "acme/support@v6-3f9c2a1b0d4e5f60", "globex/x@v1-0000000000000000", ""])
def test_an_answer_of_another_model_is_refused(model: str) -> None:
    refused = stream()
    out = refused.feed(event() + b'data: {"model":"%s","choices":[]}\n\n' % model.encode() + event())
    assert len(payloads(out)) == 1
    assert refused.failed is not None and (refused.failed.code, refused.failed.status) == ("wrong_model", 502)


@pytest.mark.parametrize("payload", [b"{", b"[1]", b"nonsense", b'{"model":3}'])
def test_an_answer_that_cannot_be_read_is_refused(payload: bytes) -> None:
    refused = stream()
    assert refused.feed(b"data: " + payload + b"\n\n") == b""
    assert refused.failed is not None and refused.failed.code == "bad_engine_answer"
    with pytest.raises(Refusal, match="cannot be read"):
        NAMING.restore(payload)


def test_the_base_model_may_have_several_names() -> None:
    restored, error = Naming("Tiny-Base", "Tiny-Base", strict=False).restore(b'{"model":"alias","x":1}')
    assert error is None and json.loads(restored) == {"model": "Tiny-Base", "x": 1}


def test_an_error_event_is_the_last_one_read() -> None:
    broken = stream()
    error = {"message": f"{ENGINE}: out of memory at /opt/x.py", "type": "InternalServerError", "code": 500}
    out = broken.feed(event() + b"data: " + json.dumps({"error": error}).encode() + b"\n\n" + event())
    assert len(payloads(out)) == 1
    assert broken.failed is not None and broken.failed.status == 500 and broken.failed.code == "engine_error"
    assert ENGINE not in broken.failed.message and "/opt" not in broken.failed.message


def problem(status: int, message: str, code: object = None, kind: str = "BadRequestError", param: object = None):  # type: ignore[no-untyped-def]
    body = json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()
    return problem_from(EngineFailure.read(status, body), SCRUBBER)


def test_refusals_of_the_engine_pass_with_the_clients_name() -> None:
    told = problem(400, f"max_tokens is too large for {ENGINE}; see /v1/chat", 400, param="max_tokens")
    assert (told.status, told.type, told.code, told.param) == (400, "invalid_request_error", None, "max_tokens")
    assert told.message == "max_tokens is too large for support; see /v1/chat"
    assert problem(429, "slow down", "rate_limit_exceeded").retry_after_s


def test_nothing_of_the_server_is_told() -> None:
    told = problem(400, "bad file /srv/manylora/disk/abc/adapter_config.json here")
    assert told.message == "bad file [path] here"
    told = problem(500, 'oops\nTraceback (most recent call last):\n  File "/opt/vllm.py"', kind="InternalServerError")
    assert told.message == "The engine failed to answer this request." and told.code == "engine_error"
    told = problem(400, 'no\nTraceback (most recent call last):\n  File "/opt/vllm.py"')
    assert told.message == "no"


def test_a_failed_load_names_the_adapter_and_never_a_path() -> None:
    told = problem(
        400, f"{ENGINE} at /mnt/nvme/disk/00ff/adapter_model.safetensors: shape [1, 2]", "adapter_load_failed"
    )
    assert (told.status, told.code) == (500, "adapter_load_failed")
    assert told.message == "The adapter 'support' could not be loaded: support at [path]: shape [1, 2]"
    told = problem(500, f"adapter {ENGINE}: rank 64 is too large", "adapter_load_failed")
    assert told.message == "The adapter 'support' could not be loaded: rank 64 is too large"


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"error":"x"}', b"\xff", b"[" * 9999])
def test_errors_in_another_shape(body: bytes) -> None:
    assert problem_from(EngineFailure.read(422, body), SCRUBBER).message == "The engine refused this request."
    assert problem_from(EngineFailure.read(500, body), SCRUBBER).code == "engine_error"
    assert problem_from(EngineFailure.read(503, body), SCRUBBER).code == "service_unavailable"
    assert problem_from(EngineFailure.read(404, body), SCRUBBER).status == 503
