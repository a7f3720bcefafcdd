"""Errors of the engine, read and made fit for a client: OpenAI's shape, the client's model name, nothing of the server.

Pure; knows no connection.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from manylora.gateway.problems import INVALID_REQUEST, RETRY_AFTER_S, SERVER_ERROR, Problem, unavailable

NOT_ON_DISK = "adapter_not_on_disk"
LOAD_FAILED = "adapter_load_failed"
ENGINE_ERROR = "engine_error"
NO_ROUTE = "no_route"
"""Ours for what FastAPI answers where vLLM has no such path for the kind of model that it serves."""
MAX_MESSAGE_CHARS = 2000

_FAILED_MESSAGE = "The engine failed to answer this request."
_TRACEBACK = "Traceback (most recent call last)"
_NO_ROUTE_BODY = b'{"detail":"Not Found"}'
_ANY_PATH = re.compile(r"(?<![\w/:.])/(?:[\w.@+~-]+/)+[\w.@+~-]*")
_TYPES = {"BadRequestError": INVALID_REQUEST, "NotFoundError": INVALID_REQUEST, "InternalServerError": SERVER_ERROR}


class _Info(msgspec.Struct):
    message: str = ""
    type: str = ""
    param: str | None = None
    code: str | int | None = None


class _Body(msgspec.Struct):
    error: _Info


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """An error answer of the engine; `code` is None unless it is a name."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None

    @classmethod
    def read(cls, status: int, body: bytes) -> EngineFailure:
        """Read an error body; one in another shape leaves only the status."""
        if status == 404 and body == _NO_ROUTE_BODY:
            return cls(status, "", "", None, NO_ROUTE)
        try:
            info = msgspec.json.decode(body, type=_Body).error
        except (msgspec.DecodeError, RecursionError):
            return cls(status, "", "", None, None)
        if isinstance(info.code, int) and 400 <= info.code <= 599:
            status = info.code
        return cls(status, info.message, info.type, info.param, info.code if isinstance(info.code, str) else None)


@dataclass(frozen=True, slots=True)
class Scrubber:
    """Takes out of a message what is not the client's: engine names become the name it asked for, folders disappear."""

    engine_model: str
    asked: str
    folders: tuple[Path, ...]

    def clean(self, message: str, *, any_path: bool = False) -> str:
        message = message.partition(_TRACEBACK)[0].rstrip()[:MAX_MESSAGE_CHARS]
        if self.engine_model != self.asked:
            message = message.replace(self.engine_model, self.asked)
        for folder in self.folders:
            message = re.sub(re.escape(str(folder)) + r"[\w./@+~-]*", "[path]", message)
        return _ANY_PATH.sub("[path]", message) if any_path else message


def problem_from(failure: EngineFailure, scrubber: Scrubber) -> Problem:
    """The client's answer to a failure of the engine.

    Messages about the client's own input are passed on; those about the server's insides are not. A model that was
    admitted and that the engine does not know is the server's fault, never the client's.
    """
    if failure.code == LOAD_FAILED:
        reason = scrubber.clean(failure.message, any_path=True).removeprefix(f"adapter {scrubber.asked}: ")
        message = f"The adapter '{scrubber.asked}' could not be loaded: {reason}".rstrip(": ")
        return Problem(failure.status if failure.status >= 500 else 500, message, SERVER_ERROR, LOAD_FAILED)
    if failure.code == NO_ROUTE:
        return Problem(404, "The model served here does not offer this path.", code="unsupported_path")
    if failure.code == NOT_ON_DISK or failure.status == 404:
        return unavailable(f"The engine cannot find '{scrubber.asked}' at the moment.")
    if failure.status >= 500:
        return _server_side(failure.status)
    message = scrubber.clean(failure.message) or "The engine refused this request."
    kind = _TYPES.get(failure.type, failure.type) or INVALID_REQUEST
    problem = Problem(failure.status, message, kind, failure.code, failure.param)
    return replace(problem, retry_after_s=RETRY_AFTER_S) if failure.status == 429 else problem


def _server_side(status: int) -> Problem:
    if status == 503:
        return unavailable("The engine cannot take this request at the moment.")
    return Problem(status, _FAILED_MESSAGE, SERVER_ERROR, ENGINE_ERROR)
