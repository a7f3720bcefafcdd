"""The SQL database behind the registry: a SQLite file, or any database that SQLAlchemy speaks to, through its URL.

PostgreSQL is the one meant for several machines. A plain SQLite file is read and written without SQLAlchemy, which is
loaded for other URLs and for migrations only. It knows the change counter, and no other table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from manylora.registry.connection import Backend, Connection
from manylora.registry.sqlite_database import SqliteDatabase

_SQLITE_FILE = "sqlite:///"


class Database:
    """An open, migrated database. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @classmethod
    def open(cls, url: str) -> Database:
        """Open the database at `url`, made and migrated as needed; several processes may do so at once."""
        path = _sqlite_path(url)
        if path is not None:
            return cls(SqliteDatabase.open(path, url, lambda: _open_with_sqlalchemy(url).close()))
        return cls(_open_with_sqlalchemy(url))

    def close(self) -> None:
        self._backend.close()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database."""
        with self._backend.reading() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that is alone in writing. It counts as a change, and commits unless the block raises."""
        with self._backend.writing() as connection:
            connection.change("UPDATE change_counter SET seq = seq + 1")
            yield connection

    def change_seq(self) -> int:
        """The number of committed changes."""
        return self._backend.read_seq()


def _sqlite_path(url: str) -> str | None:
    """The file of a plain SQLite URL; None for URLs that need SQLAlchemy, or its complaint."""
    path = url.removeprefix(_SQLITE_FILE)
    return path if url.startswith(_SQLITE_FILE) and path not in ("", ":memory:") and "?" not in path else None


def _open_with_sqlalchemy(url: str) -> Backend:
    from manylora.registry.sqlalchemy_database import SqlAlchemyDatabase

    return SqlAlchemyDatabase.open(url)
