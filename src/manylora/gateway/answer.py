"""Answers of the engine made the client's: the model's name and the errors in them. Pure; knows no connection.

Only the field `model` at the top of a JSON object is replaced, whether the object is a whole answer or one event of a
stream; texts inside are never looked at. An answer that names another version than the one admitted is refused: it may
have come from other weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
    _expected: msgspec.Raw = field(init=False, repr=False)
    """The engine's name as it is usually written. Another spelling is decoded and compared then."""
    _restored: msgspec.Raw = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_expected", msgspec.Raw(_encode(self.engine_model)))
        object.__setattr__(self, "_restored", msgspec.Raw(_encode(self.asked)))

    def restore(self, payload: bytes | bytearray) -> tuple[bytes, msgspec.Raw | None]:
        """A JSON object under the client's name, and its `error` if it has one."""
        try:
            fields = _decode(payload)
            model = fields["model"] if "model" in fields else None  # noqa: SIM401 (this is the hot path)
            named = model if model is None or model == self._expected else _decode_text(model)
        except (msgspec.DecodeError, RecursionError):
            raise Refusal(UNREADABLE) from None
        if "error" in fields and bytes(error := fields["error"]) != _NULL:
            return bytes(payload), error
        if named is None:
            return bytes(payload), None
        if named is not model and named != self.engine_model and self.strict:
            raise Refusal(WRONG_VERSION)
        fields["model"] = self._restored
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
        if self._buffer or chunk[-2:] != b"\n\n" or chunk[-3:-2] == b"\n" or b"\r" in chunk:
            return self._split(chunk)
        # Whole events with the usual line ends, which is how they nearly always come, and most often one at a time.
        if chunk[:7] == b"data: {" and b"\n" not in (payload := chunk[6:-2]):
            try:
                restored, error = self._naming.restore(payload)
                return b"data: %b\n\n" % restored if error is None else self._ended_by(error)
            except Refusal as refusal:
                self.failed = refusal.problem
                return b""
        out: list[bytes] = []
        events = chunk.split(b"\n\n")
        events.pop()
        for event in events:
            out.append(self._checked(event))
            if self.failed is not None:
                break
        return b"".join(out)

    def _split(self, chunk: bytes) -> bytes:
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
            if event[:6] == b"data: " and b"\n" not in event and b"\r" not in event:
                return self._data(event[6:])
            return self._event(event)
        except Refusal as refusal:
            self.failed = refusal.problem
            return b""

    def _event(self, event: bytes) -> bytes:
        lines = [line for line in _LINE_END.split(event) if line]
        data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
        if not data:
            return event + b"\n\n"
        others = [line + b"\n" for line in lines if not line.startswith(b"data:")]
        return b"".join(others) + self._data(b"\n".join(data))

    def _data(self, payload: bytes) -> bytes:
        if payload[:1] != b"{" and payload.strip() == _DONE:
            self.done = True
            return b"data: [DONE]\n\n"
        restored, error = self._naming.restore(payload)
        if error is None:
            return b"data: " + restored + b"\n\n"
        return self._ended_by(error)

    def _ended_by(self, error: msgspec.Raw) -> bytes:
        self.failed = problem_from(EngineFailure.read(500, b'{"error":' + bytes(error) + b"}"), self._scrubber)
        return b""
