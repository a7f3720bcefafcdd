"""A registry in one SQLite file, straight on Python's own driver.

WAL mode: readers never wait, writers queue (`BEGIN IMMEDIATE` and a busy timeout). It knows no table but Alembic's, by
which it tells whether the file is up to date; only a file that is not loads what migrations need.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from manylora.adapter import shown
from manylora.errors import Unavailable
from manylora.registry import migrations
from manylora.registry.connection import BUSY_TIMEOUT_S, READ_REVISION, READ_SEQ, Row, failed

_IDLE_MAX = 5
_T = TypeVar("_T")


class SqliteDatabase:
    """A `Backend` on a file. Connections that are idle are kept for the next transaction, of whichever thread."""

    def __init__(self, path: str, url: str) -> None:
        self._path = path
        self._url = url
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        self._seq_lock = threading.Lock()
        self._seq_connection: sqlite3.Connection | None = None

    @classmethod
    def open(cls, path: str, url: str, migrate: Callable[[], None]) -> SqliteDatabase:
        """Open the file, made if need be; `migrate` is called unless it is up to date."""
        make_folder(Path(path).parent)
        database = cls(path, url)
        with database._translated():
            with database._leased() as raw:
                current = _revision(raw) == migrations.HEAD
            if not current:
                database.close()  # first, so that nothing of ours is in the way of the migration
                migrate()
                database = cls(path, url)
        return database

    def close(self) -> None:
        with self._seq_lock:
            if self._seq_connection is not None:
                self._seq_connection.close()
                self._seq_connection = None
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for raw in idle:
            raw.close()

    @contextmanager
    def reading(self) -> Iterator[_SqliteConnection]:
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[_SqliteConnection]:
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    def read_seq(self) -> int:
        with self._translated(), self._seq_lock:
            if self._seq_connection is None:
                self._seq_connection = self._connect()
            row = self._seq_connection.execute(READ_SEQ).fetchone()
        return int(row.seq)

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[_SqliteConnection]:
        with self._translated(), self._leased() as raw:
            raw.execute(begin)
            yield _SqliteConnection(raw)
            raw.execute("COMMIT")

    @contextmanager
    def _leased(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            raw = self._idle.pop() if self._idle else None
        raw = raw or self._connect()
        try:
            yield raw
        finally:
            self._give_back(raw)

    def _give_back(self, raw: sqlite3.Connection) -> None:
        """Keep a connection for the next one; what it left open, where the block raised, is rolled back."""
        if raw.in_transaction:
            with suppress(sqlite3.Error):
                raw.execute("ROLLBACK")
        with self._lock:
            keep = not (self._closed or raw.in_transaction) and len(self._idle) < _IDLE_MAX
            if keep:
                self._idle.append(raw)
        if not keep:
            raw.close()

    def _connect(self) -> sqlite3.Connection:
        # Transactions begin where this module says, not where the driver guesses; the pool hands on between threads.
        raw = sqlite3.connect(self._path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            raw.row_factory = _row
            configure(raw)
        except BaseException:
            raw.close()
            raise
        return raw

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise failed(shown(self._url, 200), error) from error


class _SqliteConnection:
    def __init__(self, raw: sqlite3.Connection) -> None:
        self._raw = raw

    def rows(self, statement: str, /, **values: object) -> list[Row]:
        return self._raw.execute(statement, bound(values)).fetchall()

    def row(self, statement: str, /, **values: object) -> Row | None:
        return self._raw.execute(statement, bound(values)).fetchone()

    def change(self, statement: str, /, **values: object) -> int:
        return self._raw.execute(statement, bound(values)).rowcount


class _SqliteRow:
    """A row whose columns are attributes."""

    __slots__ = ("_places", "_values")

    def __init__(self, places: Mapping[str, int], values: tuple[Any, ...]) -> None:
        self._places = places
        self._values = values

    def __getattr__(self, column: str) -> Any:
        try:
            return self._values[self._places[column]]
        except KeyError:
            raise AttributeError(column) from None

    def __repr__(self) -> str:
        return repr(dict(zip(self._places, self._values, strict=True)))


def _row(cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> _SqliteRow:
    return _SqliteRow(_places(tuple(column[0] for column in cursor.description)), values)


@lru_cache(maxsize=256)
def _places(columns: tuple[str, ...]) -> dict[str, int]:
    return {column: place for place, column in enumerate(columns)}


def bound(values: Mapping[str, object]) -> dict[str, object]:
    """Times as the text in which SQLAlchemy writes them, which the migrations' tables hold."""
    return {
        name: value.isoformat(" ", "microseconds") if isinstance(value, datetime) else value
        for name, value in values.items()
    }


def _revision(raw: sqlite3.Connection) -> str | None:
    """The schema's revision; None where the file has no schema yet."""
    known = raw.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name = 'alembic_version'").fetchone()
    row = raw.execute(READ_REVISION).fetchone() if known is not None else None
    return None if row is None else str(row.version_num)


def make_folder(folder: Path) -> None:
    """Make the folder of a registry's file."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise Unavailable(
            f"the registry's folder {shown(str(folder), 200)} cannot be made: {error.strerror}",
            "set MANYLORA_HOME to a folder that you may write",
        ) from error


def configure(raw: sqlite3.Connection) -> None:
    """What holds for every connection to a registry's file."""
    raw.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
    raw.execute("PRAGMA foreign_keys = ON")
    raw.execute("PRAGMA synchronous = FULL")  # what is acknowledged stays, even when the power fails
    _patiently(lambda: raw.execute("PRAGMA journal_mode = WAL"))


def _patiently(step: Callable[[], _T]) -> _T:
    """Switching a new file to WAL ignores the busy timeout, so processes that start together have to take turns."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return step()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
