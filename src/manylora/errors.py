"""The error tree that every room shares.

    ManyloraError
    ├── InvalidInput            what the caller gave cannot be accepted as it is
    │   ├── InvalidName         a tenant, adapter, alias or model name outside the grammar
    │   ├── InvalidAdapter      a PEFT folder that is refused; says what, where in the file, what to do
    │   └── InvalidSettings     a flag or environment variable
    ├── NotFound                absent, or not for this caller (the two are never told apart)
    ├── Conflict                the same name or number already means something else
    ├── Unauthenticated         no key, or one that is unknown, revoked or expired
    ├── PermissionDenied        a known caller without the right for an administrative act
    ├── CorruptBlob             bytes at rest that no longer match their digest
    └── Unavailable             a part this process depends on does not answer (engine, registry, store)

Only errors that come from outside are raised from this tree; broken invariants of our own are assertions.
HTTP status codes and CLI exit codes are each mapped in one place, never here.
"""

from __future__ import annotations


class ManyloraError(Exception):
    """What went wrong in one line (`message`), and what the person can do about it (`hint`, may be empty)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidInput(ManyloraError):
    """The input cannot be accepted as it is; trying again unchanged fails again."""


class InvalidName(InvalidInput):
    """A name outside the grammar of `manylora.adapter`."""


class InvalidAdapter(InvalidInput):
    """A PEFT folder that is refused: what is wrong, where in the file, and what to do."""


class InvalidSettings(InvalidInput):
    """A flag or environment variable whose value cannot be used."""


class NotFound(ManyloraError):
    """Absent, or not for this caller: the message never tells which."""


class Conflict(ManyloraError):
    """The name or number already stands for something else."""


class Unauthenticated(ManyloraError):
    """No API key, or one that is unknown, revoked or expired."""


class PermissionDenied(ManyloraError):
    """A known caller lacks the right for an administrative act."""


class CorruptBlob(ManyloraError):
    """Stored bytes do not match the digest under which they are kept."""


class Unavailable(ManyloraError):
    """A part that this process depends on does not answer now; the same call may succeed later."""
