"""Errors as OpenAI clients expect them. Owns the one map from the error tree to HTTP; knows nothing of routes.

Every error body is `{"error": {"message", "type", "param", "code"}}`; `code` is a name or null.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
from starlette.responses import Response

from manylora.adapter import shown
from manylora.errors import (
    Conflict,
    CorruptBlob,
    InvalidInput,
    ManyloraError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)

RETRY_AFTER_S = 2
INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


@dataclass(frozen=True, slots=True)
class Problem:
    """One error answer."""

    status: int
    message: str
    type: str = INVALID_REQUEST
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    close: bool = False
    """Whether the connection ends with this answer, because the rest of the request was not read."""

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """The error as the last event of a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the answer has beside its length."""
        headers = [] if self.retry_after_s is None else [(b"retry-after", b"%d" % self.retry_after_s)]
        if self.close:
            headers.append((b"connection", b"close"))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return [*headers, (b"content-type", b"application/json")]

    def response(self) -> Response:
        headers = {name.decode(): value.decode() for name, value in self.headers()}
        return Response(self.body(), self.status, headers)


class Refusal(ManyloraError):
    """A request whose answer is already decided: `problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def bad_request(message: str, param: str | None = None) -> Refusal:
    return Refusal(Problem(400, message, param=param))


def model_not_found(asked: str) -> Refusal:
    """The one answer for a model that is absent, malformed, retired or not for this caller."""
    return Refusal(Problem(404, f"The model '{shown(asked)}' does not exist.", code="model_not_found", param="model"))


def engine_unavailable(message: str = "The engine does not answer at the moment.") -> Refusal:
    return Refusal(unavailable(message))


def unavailable(message: str) -> Problem:
    return Problem(503, message, SERVER_ERROR, "service_unavailable", retry_after_s=RETRY_AFTER_S)


INTERNAL = Problem(
    500, "An internal error occurred; the request id names it in the logs.", SERVER_ERROR, "internal_error"
)
NO_SUCH_PATH = Problem(404, "There is nothing at this path.", code="not_found")
WRONG_METHOD = Problem(405, "This path does not take this method.", code="method_not_allowed")

# The first class that the error is an instance of decides. A message of ours about the caller's own input is passed on;
# one about our insides (an empty message here means: the error's own) is for the log only.
_BY_CLASS: tuple[tuple[type[ManyloraError], Problem], ...] = (
    (InvalidInput, Problem(400, "")),
    (NotFound, Problem(404, "", code="not_found")),
    (Conflict, Problem(409, "", code="conflict")),
    (Unauthenticated, Problem(401, "", code="invalid_api_key")),
    (PermissionDenied, Problem(403, "", type="permission_error", code="permission_denied")),
    (CorruptBlob, Problem(500, "The stored adapter is damaged.", SERVER_ERROR, "adapter_corrupt")),
    (Unavailable, unavailable("A part of this service does not answer at the moment.")),
)


def problem_of(error: Exception) -> Problem:
    """The one map from errors to HTTP."""
    if isinstance(error, Refusal):
        return error.problem
    for kind, problem in _BY_CLASS:
        if isinstance(error, kind):
            return problem if problem.message else replace(problem, message=str(error))
    return INTERNAL
