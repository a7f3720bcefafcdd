"""Answers of the engine made the client's: the model's name and the errors in them. Pure; knows no connection.

Only the field `model` at the top of a JSON object is replaced, whether the object is a whole answer or one event of a
stream; texts inside are never looked at. An answer that names another version than the one admitted is refused: it may
have come from other weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from manylora.gateway.engine_errors import EngineFailure, Scrubber, problem_from
from manylora.gateway.problems import SERVER_ERROR, Problem, Refusal

MAX_EVENT_BYTES = 64 * 1024 * 1024

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode
_BLANK_LINE = re.compile(rb"\n\n|\r\n\r\n|\r\r")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_DONE = b"[DONE]"
_NULL = b"null"

WRONG_VERSION = Problem(502, "The engine answered with another model.", SERVER_ERROR, "wrong_model")
UNREADABLE = Problem(502, "The engine sent an answer that cannot be read.", SERVER_ERROR, "bad_engine_answer")


@dataclass(frozen=True, slots=True)
class Naming:
    """The name that the engine must answer under, and the one that the client reads instead."""

    engine_model: str
    asked: str
    strict: bool
    """Whether any other name is refused; the base model may have several."""

    def restore(self, payload: bytes | bytearray) -> tuple[bytes, msgspec.Raw | None]:
        """A JSON object under the client's name, and its `error` if it has one."""
        try:
            fields = _decode(payload)
            named = _decode_text(fields["model"]) if "model" in fields else None
        except (msgspec.DecodeError, RecursionError):
            raise Refusal(UNREADABLE) from None
        error = fields.get("error")
        if error is not None and bytes(error) != _NULL:
            return bytes(payload), error
        if named is None:
            return bytes(payload), None
        if named != self.engine_model and self.strict:
            raise Refusal(WRONG_VERSION)
        fields["model"] = msgspec.Raw(_encode(self.asked))
        return _encode(fields), None


class EventStream:
    """Server-sent events in, the same events out under the client's name; any chunk boundaries.

    `feed` returns only whole events. The event `[DONE]` sets `done`. An error event, or one that must not be passed on,
    sets `failed` and is the last one read.
    """

    def __init__(self, naming: Naming, scrubber: Scrubber) -> None:
        self._naming = naming
        self._scrubber = scrubber
        self._buffer = bytearray()
        self._searched = 0
        self.done = False
        self.failed: Problem | None = None

    def feed(self, chunk: bytes) -> bytes:
        buffer = self._buffer
        buffer += chunk
        out: list[bytes] = []
        position = 0
        start = max(0, self._searched - 3)
        while self.failed is None and (blank := _BLANK_LINE.search(buffer, start)):
            out.append(self._checked(bytes(buffer[position : blank.start()])))
            position = start = blank.end()
        del buffer[:position]
        self._searched = len(buffer)
        if self._searched > MAX_EVENT_BYTES:
            raise Refusal(UNREADABLE)
        return b"".join(out)

    def _checked(self, event: bytes) -> bytes:
        try:
            return self._event(event)
        except Refusal as refusal:
            self.failed = refusal.problem
            return b""

    def _event(self, event: bytes) -> bytes:
        if event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event:
            return self._data(event[6:], event)
        lines = [line for line in _LINE_END.split(event) if line]
        data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
        if not data:
            return event + b"\n\n"
        others = [line + b"\n" for line in lines if not line.startswith(b"data:")]
        return b"".join(others) + self._data(b"\n".join(data), event)

    def _data(self, payload: bytes, event: bytes) -> bytes:
        if payload.strip() == _DONE:
            self.done = True
            return b"data: [DONE]\n\n"
        restored, error = self._naming.restore(payload)
        if error is None:
            return b"data: " + restored + b"\n\n"
        self.failed = problem_from(EngineFailure.read(500, b'{"error":' + bytes(error) + b"}"), self._scrubber)
        return b""
