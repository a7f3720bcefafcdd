"""The SQL database behind the registry: how it is opened, migrated, read and written. The one place that knows
dialects.

SQLite runs in WAL mode: readers never wait, writers queue (`BEGIN IMMEDIATE` and a busy timeout). Any database that
SQLAlchemy speaks to works through its URL; PostgreSQL is the one meant for several machines. Every error of the driver
leaves here as an error of manylora. It knows the change counter, and no other table.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, exc, make_url, text, update
from sqlalchemy.engine import URL

from manylora.adapter import shown
from manylora.errors import InvalidSettings, ManyloraError, Unavailable
from manylora.registry import migrations
from manylora.registry.tables import change_counter

BUSY_TIMEOUT_S = 30.0
_MODE = "manylora_transaction"
_MIGRATION_LOCK = 0x6D616E79  # the key of PostgreSQL's advisory lock: "many"
_READ_SEQ = "SELECT seq FROM change_counter WHERE id = 1"
_T = TypeVar("_T")


class Database:
    """An open, migrated database. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = _options(engine, "BEGIN", "REPEATABLE READ")
        self._writing = _options(engine, "BEGIN IMMEDIATE", "READ COMMITTED")
        self._seq_lock = threading.Lock()
        self._seq_connection: Connection | None = None

    @classmethod
    def open(cls, url: str) -> Database:
        """Open the database at `url`, made and migrated as needed; several processes may do so at once."""
        parsed = _parse_url(url)
        with translated(parsed):
            engine = _create_engine(parsed)
            try:
                _migrate(engine, parsed)
            except BaseException:
                engine.dispose()
                raise
        return cls(engine)

    @property
    def url(self) -> URL:
        return self._engine.url

    def close(self) -> None:
        with self._seq_lock:
            self._drop_seq_connection()
        self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database."""
        with translated(self.url), self._reading.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that is alone in writing. It counts as a change, and commits unless the block raises."""
        with translated(self.url), self._writing.begin() as connection:
            connection.execute(update(change_counter).values(seq=change_counter.c.seq + 1))
            yield connection

    def change_seq(self) -> int:
        """The number of committed changes, over a connection that is kept for nothing else (it is asked very often)."""
        with translated(self.url), self._seq_lock:
            try:
                return self._read_seq()
            except (exc.SQLAlchemyError, self._driver_error):
                self._drop_seq_connection()  # a restarted server closes what was open; once more on a new one
            try:
                return self._read_seq()
            except self._driver_error as error:
                raise exc.OperationalError(_READ_SEQ, None, error) from error

    @property
    def _driver_error(self) -> type[Exception]:
        found: type[Exception] = self._engine.dialect.loaded_dbapi.Error
        return found

    def _read_seq(self) -> int:
        """Straight on the driver's connection: SQLAlchemy's own work would be most of the time."""
        if self._seq_connection is None:
            self._seq_connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        cursor = self._seq_connection.connection.cursor()
        try:
            cursor.execute(_READ_SEQ)
            row = cursor.fetchone()
        finally:
            cursor.close()
        assert row is not None
        return int(row[0])

    def _drop_seq_connection(self) -> None:
        if self._seq_connection is not None:
            self._seq_connection.close()
            self._seq_connection = None


def _options(engine: Engine, sqlite_begin: str, isolation_level: str) -> Engine:
    """The same engine, whose transactions begin as its dialect needs for a reader or a writer."""
    if _is_sqlite(engine.url):
        return engine.execution_options(**{_MODE: sqlite_begin})
    return engine.execution_options(isolation_level=isolation_level)


def utc_now() -> datetime:
    """Now, as the tables keep it: UTC, without a zone."""
    return datetime.now(UTC).replace(tzinfo=None)


def as_utc(value: datetime) -> datetime:
    """A time from the tables, with its zone."""
    return value.replace(tzinfo=UTC)


@contextmanager
def translated(url: URL) -> Iterator[None]:
    """Turn the driver's errors into `Unavailable`, one line each."""
    try:
        yield
    except (exc.SQLAlchemyError, sqlite3.Error) as error:
        cause = getattr(error, "orig", None) or error
        reason = shown(" ".join(str(cause).split()), 200)
        raise Unavailable(f"the registry's database {_shown_url(url)} failed: {reason}", _hint(reason)) from error


def _hint(reason: str) -> str:
    if "full" in reason:
        return "free some space on its disk and try again"
    if "readonly" in reason or "unable to open" in reason or "ermission" in reason:
        return "check that its folder exists and may be written"
    if "not a database" in reason or "malformed" in reason:
        return "the file is damaged or no database; restore a copy, or choose another MANYLORA_DATABASE_URL"
    return "check MANYLORA_DATABASE_URL and that the database answers"


def _shown_url(url: URL) -> str:
    return shown(url.render_as_string(hide_password=True), 200)


def _parse_url(url: str) -> URL:
    try:
        parsed = make_url(url)
        parsed.get_dialect()
    except (exc.ArgumentError, exc.NoSuchModuleError) as error:
        raise InvalidSettings(
            "the database URL cannot be used",
            "MANYLORA_DATABASE_URL looks like sqlite:///path or postgresql+psycopg://…",
        ) from error
    if _is_sqlite(parsed) and parsed.database in (None, "", ":memory:"):
        raise InvalidSettings(
            "the database URL names no file", "give MANYLORA_DATABASE_URL=sqlite:////path/registry.db"
        )
    return parsed


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _create_engine(url: URL) -> Engine:
    try:
        if not _is_sqlite(url):
            return create_engine(url, pool_pre_ping=True)
        engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    except ImportError as error:
        raise InvalidSettings(
            f"the database driver for {_shown_url(url)} is not installed: {error}", "pip install 'manylora[postgres]'"
        ) from error
    _make_folder(url)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _make_folder(url: URL) -> None:
    assert url.database is not None
    folder = Path(url.database).parent
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise Unavailable(
            f"the registry's folder {shown(str(folder), 200)} cannot be made: {error.strerror}",
            "set MANYLORA_HOME to a folder that you may write",
        ) from error


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where `_begin_sqlite` says, not where the driver guesses
    connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")  # what is acknowledged stays, even when the power fails
    _patiently(lambda: connection.execute("PRAGMA journal_mode = WAL"))


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


def _begin_sqlite(connection: Connection) -> None:
    mode = connection.get_execution_options().get(_MODE)
    if mode is not None:
        connection.exec_driver_sql(mode)


# --- migrations -----------------------------------------------------------------------------------------------------


def _migrate(engine: Engine, url: URL) -> None:
    with engine.connect() as connection:
        if _revision(connection) == migrations.HEAD:
            return
    with _options(engine, "BEGIN IMMEDIATE", "READ COMMITTED").begin() as connection:
        if url.get_backend_name() == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        found = _revision(connection)  # again: another process may have been faster
        if found is not None and found not in migrations.REVISIONS:
            raise _from_the_future(url, found)
        if found != migrations.HEAD:
            migrations.upgrade(connection)


def _revision(connection: Connection) -> str | None:
    if not connection.dialect.has_table(connection, "alembic_version"):
        return None
    value: Any = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return str(value) if value is not None else None


def _from_the_future(url: URL, revision: str) -> ManyloraError:
    return Unavailable(
        f"the registry's database {_shown_url(url)} was written by a newer manylora (revision {shown(revision)})",
        "upgrade manylora on this machine, or choose another MANYLORA_HOME",
    )
