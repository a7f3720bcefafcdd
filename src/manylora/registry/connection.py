"""What the registry asks of a database: SQL text with named values in, rows out. Which driver runs it is unknown here.

The statements are plain SQL that SQLite and PostgreSQL both understand, written beside the code that needs them. They
are text rather than SQLAlchemy expressions because importing SQLAlchemy costs 0.3 s of processor time, which every
`manylora adapter push` would take from an engine on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any, Protocol

from manylora.adapter import shown
from manylora.errors import Unavailable

BUSY_TIMEOUT_S = 30.0
READ_SEQ = "SELECT seq FROM change_counter WHERE id = 1"
READ_REVISION = "SELECT version_num FROM alembic_version"

Row = Any
"""One row; its columns are attributes."""


class Connection(Protocol):
    """An open transaction. Values are given by name: `:tenant` in the statement, `tenant=` in the call."""

    def rows(self, statement: str, /, **values: object) -> Sequence[Row]:
        """All rows of a query."""

    def row(self, statement: str, /, **values: object) -> Row | None:
        """The first row of a query, or None."""

    def change(self, statement: str, /, **values: object) -> int:
        """Run an INSERT, UPDATE or DELETE; how many rows it changed."""


class Backend(Protocol):
    """An open, migrated database of one kind. Thread-safe; its errors leave as errors of manylora."""

    def reading(self) -> AbstractContextManager[Connection]:
        """A transaction that sees one state of the database."""

    def writing(self) -> AbstractContextManager[Connection]:
        """A transaction that is alone in writing; it commits unless the block raises."""

    def read_seq(self) -> int:
        """The change counter, over a connection that is kept for nothing else (it is asked very often)."""

    def close(self) -> None: ...


def utc_now() -> datetime:
    """Now, as the tables keep it: UTC, without a zone."""
    return datetime.now(UTC).replace(tzinfo=None)


def as_utc(value: datetime | str) -> datetime:
    """A time from the tables (SQLite has no type for one and gives text), with its zone."""
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    return moment.replace(tzinfo=UTC)


def failed(shown_url: str, cause: BaseException) -> Unavailable:
    """The error of a driver as one line, and what to do."""
    reason = shown(" ".join(str(cause).split()), 200)
    return Unavailable(f"the registry's database {shown_url} failed: {reason}", _hint(reason))


def _hint(reason: str) -> str:
    if "full" in reason:
        return "free some space on its disk and try again"
    if "readonly" in reason or "unable to open" in reason or "ermission" in reason:
        return "check that its folder exists and may be written"
    if "not a database" in reason or "malformed" in reason:
        return "the file is damaged or no database; restore a copy, or choose another MANYLORA_DATABASE_URL"
    return "check MANYLORA_DATABASE_URL and that the database answers"
