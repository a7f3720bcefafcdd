"""A registry in any database that SQLAlchemy speaks to, and the migrations of all of them.

Every error of the driver leaves here as an error of manylora. It knows no table but Alembic's and the change counter.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import Engine, create_engine, event, exc, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.sql.elements import TextClause

from manylora.adapter import shown
from manylora.errors import InvalidSettings, ManyloraError, Unavailable
from manylora.registry import migrations
from manylora.registry.connection import BUSY_TIMEOUT_S, READ_REVISION, READ_SEQ, Row, failed
from manylora.registry.sqlite_database import bound, configure, make_folder

_MODE = "manylora_transaction"
_MIGRATION_LOCK = 0x6D616E79  # the key of PostgreSQL's advisory lock: "many"


class SqlAlchemyDatabase:
    """A `Backend` on a SQLAlchemy engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = _options(engine, "BEGIN", "REPEATABLE READ")
        self._writing = _options(engine, "BEGIN IMMEDIATE", "READ COMMITTED")
        self._seq_lock = threading.Lock()
        self._seq_connection: sqlalchemy.Connection | None = None

    @classmethod
    def open(cls, url: str) -> SqlAlchemyDatabase:
        """Open the database at `url`, made and migrated as needed; several processes may do so at once."""
        parsed = _parse_url(url)
        with _translated(parsed):
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
    def reading(self) -> Iterator[_SqlAlchemyConnection]:
        with _translated(self.url), self._reading.begin() as connection:
            yield _SqlAlchemyConnection(connection)

    @contextmanager
    def writing(self) -> Iterator[_SqlAlchemyConnection]:
        with _translated(self.url), self._writing.begin() as connection:
            yield _SqlAlchemyConnection(connection)

    def read_seq(self) -> int:
        with _translated(self.url), self._seq_lock:
            try:
                return self._read_seq()
            except (exc.SQLAlchemyError, self._driver_error):
                self._drop_seq_connection()  # a restarted server closes what was open; once more on a new one
            try:
                return self._read_seq()
            except self._driver_error as error:
                raise exc.OperationalError(READ_SEQ, None, error) from error

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
            cursor.execute(READ_SEQ)
            row = cursor.fetchone()
        finally:
            cursor.close()
        assert row is not None
        return int(row[0])

    def _drop_seq_connection(self) -> None:
        if self._seq_connection is not None:
            self._seq_connection.close()
            self._seq_connection = None


class _SqlAlchemyConnection:
    def __init__(self, connection: sqlalchemy.Connection) -> None:
        self._connection = connection

    def rows(self, statement: str, /, **values: object) -> Sequence[Row]:
        return self._execute(statement, values).all()

    def row(self, statement: str, /, **values: object) -> Row | None:
        return self._execute(statement, values).first()

    def change(self, statement: str, /, **values: object) -> int:
        return self._execute(statement, values).rowcount

    def _execute(self, statement: str, values: Mapping[str, object]) -> sqlalchemy.CursorResult[Any]:
        is_sqlite = self._connection.dialect.name == "sqlite"
        return self._connection.execute(_text(statement), bound(values) if is_sqlite else dict(values))


@lru_cache(maxsize=256)
def _text(statement: str) -> TextClause:
    return text(statement)


def _options(engine: Engine, sqlite_begin: str, isolation_level: str) -> Engine:
    """The same engine, whose transactions begin as its dialect needs for a reader or a writer."""
    if _is_sqlite(engine.url):
        return engine.execution_options(**{_MODE: sqlite_begin})
    return engine.execution_options(isolation_level=isolation_level)


@contextmanager
def _translated(url: URL) -> Iterator[None]:
    try:
        yield
    except (exc.SQLAlchemyError, sqlite3.Error) as error:
        raise failed(_shown_url(url), getattr(error, "orig", None) or error) from error


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
    assert url.database is not None
    make_folder(Path(url.database).parent)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where `_begin_sqlite` says, not where the driver guesses
    configure(connection)


def _begin_sqlite(connection: sqlalchemy.Connection) -> None:
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


def _revision(connection: sqlalchemy.Connection) -> str | None:
    if not connection.dialect.has_table(connection, "alembic_version"):
        return None
    value: Any = connection.execute(text(READ_REVISION)).scalar()
    return str(value) if value is not None else None


def _from_the_future(url: URL, revision: str) -> ManyloraError:
    return Unavailable(
        f"the registry's database {_shown_url(url)} was written by a newer manylora (revision {shown(revision)})",
        "upgrade manylora on this machine, or choose another MANYLORA_HOME",
    )
