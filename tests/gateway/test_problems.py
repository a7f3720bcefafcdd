"""The one map from errors to HTTP."""

from __future__ import annotations

import json

import pytest

from manylora import errors
from manylora.gateway.problems import model_not_found, problem_of


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (errors.InvalidInput, 400, None),
        (errors.InvalidName, 400, None),
        (errors.InvalidAdapter, 400, None),
        (errors.NotFound, 404, "not_found"),
        (errors.Conflict, 409, "conflict"),
        (errors.Unauthenticated, 401, "invalid_api_key"),
        (errors.PermissionDenied, 403, "permission_denied"),
        (errors.CorruptBlob, 500, "adapter_corrupt"),
        (errors.Unavailable, 503, "service_unavailable"),
        (errors.ManyloraError, 500, "internal_error"),
    ],
)
def test_every_class_has_a_status(kind: type[errors.ManyloraError], status: int, code: str | None) -> None:
    problem = problem_of(kind("what happened", "do this"))
    assert (problem.status, problem.code) == (status, code)
    body = json.loads(problem.body())["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert (body["message"] == "what happened (do this)") == (status < 500)
    assert ("retry-after" in problem.response().headers) == (status == 503)


def test_what_no_code_expected_tells_nothing() -> None:
    assert "secret" not in problem_of(RuntimeError("secret")).message


@pytest.mark.parametrize("asked", ["x" * 10_000, "🦙" * 100, '"\n\0\x1b[31m', "</script>"])
def test_a_quoted_name_is_bounded_and_printable(asked: str) -> None:
    message = model_not_found(asked).problem.message
    assert len(message) < 130 and message.replace("…", "").isascii() and message.isprintable()
