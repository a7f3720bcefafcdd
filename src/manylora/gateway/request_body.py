"""Reading a request: bounded in bytes and time, one JSON object, taken apart without touching what is passed on.

Knows nothing of what the fields mean, `model` excepted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from starlette.types import Receive

from manylora.adapter import shown
from manylora.gateway.client import ClientGone
from manylora.gateway.eager import Waiting, run_now
from manylora.gateway.problems import Problem, Refusal, bad_request

READ_TIMEOUT_S = 60.0
LINGER_S = 2.0
LINGER_BYTES = 64 * 1024 * 1024

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_OPEN = re.compile(rb"[ \t\n\r]*\{")
_KEY = re.compile(rb'[ \t\n\r]*("(?:[^"\\]|\\.)*")[ \t\n\r]*:[ \t\n\r]*', re.DOTALL)
_NEXT_KEY = re.compile(rb'[ \t\n\r]*,[ \t\n\r]*("(?:[^"\\]|\\.)*")[ \t\n\r]*:[ \t\n\r]*', re.DOTALL)
_END = re.compile(rb"[ \t\n\r]*\}")


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A JSON object: its fields undecoded, and where the value of `model` lies, so that only it is replaced."""

    raw: bytes
    fields: Mapping[str, msgspec.Raw]
    model: str
    model_span: tuple[int, int]

    def with_model(self, name: str) -> bytes:
        """The body with another `model`; every other byte is as it came."""
        start, end = self.model_span
        return b"".join((self.raw[:start], msgspec.json.encode(name), self.raw[end:]))


async def read_bytes(headers: Mapping[str, str], receive: Receive, max_bytes: int) -> bytes:
    """The whole body, at most `max_bytes` of it in memory; raises `Refusal`, or `ClientGone`."""
    if headers.get("content-encoding", "identity") != "identity":
        raise Refusal(Problem(415, "Compressed request bodies are not accepted; send the JSON as it is.", close=True))
    reading = run_now(_read(headers, receive, max_bytes))
    if not isinstance(reading, Waiting):
        return reading
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await reading
    except TimeoutError:
        raise Refusal(Problem(408, "The request body did not arrive in time.", close=True)) from None


async def _read(headers: Mapping[str, str], receive: Receive, max_bytes: int) -> bytes:
    declared = headers.get("content-length", "0")
    too_large = declared.isdigit() and int(declared) > max_bytes
    parts: list[bytes] = []
    size = 0
    while not too_large:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while it sent its request")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            too_large = True
        elif not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
    del parts
    if "expect" not in headers:
        await _discard(receive)
    raise Refusal(
        Problem(413, f"The request body is larger than {max_bytes} bytes.", code="body_too_large", close=True)
    )


async def _discard(receive: Receive) -> None:
    """Read on for a moment: a client that is still sending sees our answer only if we don't reset its connection."""
    left = LINGER_BYTES
    try:
        async with asyncio.timeout(LINGER_S):
            while left > 0:
                message = await receive()
                left -= max(1, len(message.get("body", b"")))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def decode_fields(raw: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a JSON object with its values left undecoded."""
    try:
        return _decode_object(raw)
    except msgspec.ValidationError:
        raise bad_request("The request body must be a JSON object.") from None
    except msgspec.DecodeError as error:
        raise bad_request(f"The request body is not valid JSON: {shown(str(error), 160)}") from None
    except RecursionError:
        raise bad_request("The request body is nested too deeply.") from None


def parse(raw: bytes) -> JsonBody:
    """Take a request body apart; raises `Refusal` unless it is an object with one text `model` and no field twice."""
    fields = decode_fields(raw)
    if "model" not in fields:
        raise bad_request("The field 'model' is missing.", "model")
    try:
        model = _decode_text(fields["model"])
    except msgspec.DecodeError:
        raise bad_request("The field 'model' must be a text.", "model") from None
    return JsonBody(raw, fields, model, refuse_repeated(raw, fields))


def refuse_repeated(raw: bytes, fields: Mapping[str, msgspec.Raw]) -> tuple[int, int]:
    """Walk over the top level and refuse a field that is given twice; returns where the value of `model` lies.

    `fields` holds the last value of each name. So an earlier one shows itself: either its bytes are not the ones kept,
    or the name comes up a second time. Two readers of one body must never see two different models.
    """
    opening = _OPEN.match(raw)
    assert opening is not None
    seen: set[str] = set()
    span = (0, 0)
    name, position = "", opening.end()
    match = _KEY.match(raw, position)
    while match is not None:
        name = _decode_text(match[1])
        value = memoryview(fields[name])
        start = match.end()
        position = start + len(value)
        if name in seen or raw[start:position] != value:
            raise _twice(name)
        seen.add(name)
        if name == "model":
            span = (start, position)
        match = _NEXT_KEY.match(raw, position)
    if len(seen) != len(fields) or _END.match(raw, position) is None:
        raise _twice(name)
    return span


def _twice(name: str) -> Refusal:
    which = f"The field '{shown(name)}'" if name else "A field"
    return bad_request(f"{which} is given more than once.", "model" if name == "model" else None)
