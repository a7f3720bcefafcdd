"""What the exit codes of `manylora` mean, and the one mapping from our errors to them."""

from __future__ import annotations

from enum import IntEnum

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


class ExitCode(IntEnum):
    """Stable: scripts may rely on these numbers."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    INVALID_INPUT = 3
    NOT_FOUND = 4
    CONFLICT = 5
    UNAVAILABLE = 6
    CORRUPT = 7
    NOT_PERMITTED = 8
    INTERRUPTED = 130


_BY_ERROR: tuple[tuple[type[ManyloraError], ExitCode], ...] = (
    (InvalidInput, ExitCode.INVALID_INPUT),
    (NotFound, ExitCode.NOT_FOUND),
    (Conflict, ExitCode.CONFLICT),
    (Unavailable, ExitCode.UNAVAILABLE),
    (CorruptBlob, ExitCode.CORRUPT),
    (Unauthenticated, ExitCode.NOT_PERMITTED),
    (PermissionDenied, ExitCode.NOT_PERMITTED),
)


def exit_code(error: ManyloraError) -> ExitCode:
    """The exit code for an error that reached the top."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), ExitCode.UNEXPECTED)
