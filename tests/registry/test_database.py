from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from manylora.errors import InvalidSettings, Unavailable
from manylora.registry import migrations
from manylora.registry.connection import as_utc, utc_now
from manylora.registry.database import Database
from manylora.registry.sqlite_database import SqliteDatabase
from manylora.registry.tables import metadata


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder / 'home' / 'registry.db'}"


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database.open(url_of(tmp_path))


def test_the_migrations_lead_to_the_tables(tmp_path: Path, database: Database) -> None:
    database.close()
    with create_engine(url_of(tmp_path)).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        indexes = connection.dialect.get_indexes(connection, "versions")
        assert [index["name"] for index in indexes] == ["ix_versions_digest"]
        connection.engine.dispose()


def test_the_list_of_revisions_is_alembics() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)
    assert tuple(reversed([step.revision for step in script.walk_revisions()])) == migrations.REVISIONS
    assert script.get_current_head() == migrations.HEAD


def test_sqlite_is_opened_for_several_processes(database: Database) -> None:
    with database.read() as connection:
        rows = [
            str(connection.row(f"PRAGMA {name}"))
            for name in ("journal_mode", "foreign_keys", "synchronous", "busy_timeout")
        ]
    assert rows == ["{'journal_mode': 'wal'}", "{'foreign_keys': 1}", "{'synchronous': 2}", "{'timeout': 30000}"]
    database.close()


def test_opening_again_changes_nothing(tmp_path: Path, database: Database) -> None:
    with database.write():
        pass
    database.close()
    again = Database.open(url_of(tmp_path))
    assert again.change_seq() == 1
    again.close()


def test_processes_that_open_a_fresh_home_at_once_all_succeed(tmp_path: Path) -> None:
    program = (
        "import sys; from manylora.registry.database import Database\n"
        "sys.stdin.read(1)\n"
        "database = Database.open(sys.argv[1])\n"
        "with database.write(): pass\n"
        "database.close()\n"
    )
    command = [sys.executable, "-W", "error", "-c", program, url_of(tmp_path)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(5)]
    time.sleep(1.5)  # until all have imported; then let them loose together
    results = [process.communicate(b"x", timeout=60) for process in processes]
    assert [(process.returncode, errors) for process, (_, errors) in zip(processes, results, strict=True)] == [
        (0, b"")
    ] * 5
    database = Database.open(url_of(tmp_path))
    assert database.change_seq() == 5
    database.close()


def test_a_sqlite_url_with_options_reads_and_writes_the_same(tmp_path: Path, database: Database) -> None:
    """Such a URL goes through SQLAlchemy; the file, its times among them, is the same to both."""
    now = utc_now().replace(microsecond=0)
    other = Database.open(url_of(tmp_path) + "?timeout=30")
    statement = "INSERT INTO tenants (name, created_at) VALUES (:name, :now)"
    with database.write() as connection:
        assert connection.change(statement, name="plain", now=now) == 1
    with other.write() as connection:
        assert connection.change(statement, name="options", now=now) == 1
    for opened in (database, other):
        with opened.read() as connection:
            rows = connection.rows("SELECT name, created_at FROM tenants ORDER BY name")
            assert [(row.name, as_utc(row.created_at)) for row in rows] == [
                ("options", as_utc(now)),
                ("plain", as_utc(now)),
            ]
            assert connection.row("SELECT name FROM tenants WHERE name = :name", name="absent") is None
        assert opened.change_seq() == 2
        opened.close()


def test_a_transaction_that_fails_leaves_nothing_behind(database: Database) -> None:
    for _ in range(20):
        with pytest.raises(ZeroDivisionError), database.write() as connection:
            connection.change("INSERT INTO tenants (name, created_at) VALUES ('x', :now)", now=utc_now())
            raise ZeroDivisionError
    with database.read() as connection:
        assert connection.rows("SELECT * FROM tenants") == []
    with pytest.raises(Unavailable, match="failed"), database.write() as connection:
        connection.change("INSERT INTO grants VALUES ('nobody', 'nobody', '*')")  # foreign keys hold
    with database.write():
        pass
    assert database.change_seq() == 1
    database.close()


def test_connections_that_are_not_in_use_are_few_and_closed_in_the_end(tmp_path: Path, database: Database) -> None:
    def ask() -> None:
        for _ in range(20):
            with database.read() as connection:
                connection.row("SELECT seq FROM change_counter")

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    backend = database._backend
    assert isinstance(backend, SqliteDatabase)
    assert 1 <= len(backend._idle) <= 5
    database.close()
    assert not (tmp_path / "home" / "registry.db-wal").exists()


def test_the_change_counter(tmp_path: Path, database: Database) -> None:
    other = Database.open(url_of(tmp_path))
    assert (database.change_seq(), other.change_seq()) == (0, 0)
    with database.write():
        assert other.change_seq() == 0
    assert (database.change_seq(), other.change_seq()) == (1, 1)
    with pytest.raises(ZeroDivisionError), other.write():
        raise ZeroDivisionError
    assert (database.change_seq(), other.change_seq()) == (1, 1)
    with database.read():
        assert database.change_seq() == 1
    database.close()
    other.close()


def test_the_change_counter_is_cheap_and_may_be_asked_from_any_thread(database: Database) -> None:
    times: list[float] = []

    def ask() -> None:
        for _ in range(200):
            begin = time.perf_counter()
            database.change_seq()
            times.append(time.perf_counter() - begin)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(times) == 800
    alone = []
    for _ in range(500):
        begin = time.perf_counter()
        database.change_seq()
        alone.append(time.perf_counter() - begin)
    assert sorted(alone)[250] < 200e-6
    database.close()


def test_writers_wait_for_each_other_and_readers_do_not(database: Database) -> None:
    order: list[str] = []

    def write_too() -> None:
        with database.write():
            order.append("second")

    with database.write():
        thread = threading.Thread(target=write_too)
        thread.start()
        time.sleep(0.1)
        with database.read() as connection:
            row = connection.row("SELECT seq FROM change_counter")
            assert row is not None and row.seq == 0
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert database.change_seq() == 2
    database.close()


def test_a_database_from_a_newer_manylora_is_left_alone(tmp_path: Path, database: Database) -> None:
    with database.write() as connection:
        connection.change("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    with pytest.raises(Unavailable, match="written by a newer manylora") as caught:
        Database.open(url_of(tmp_path))
    assert "upgrade manylora" in caught.value.hint


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "sqlite://", "sqlite:///:memory:", "nosuchdb://x", "sqlite:///", "mysql+nosuch://x", "://"],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(InvalidSettings, match="database") as caught:
        Database.open(url)
    assert "MANYLORA_DATABASE_URL" in caught.value.hint


def test_passwords_are_not_shown() -> None:
    with pytest.raises((Unavailable, InvalidSettings)) as caught:
        Database.open("postgresql+psycopg://me:topsecret@127.0.0.1:1/x?connect_timeout=2")
    assert "topsecret" not in str(caught.value)


def test_a_home_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(Unavailable, match="folder"):
        Database.open(url_of(tmp_path))


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "registry.db").write_text("this is no database, whatever its name says" * 50)
    with pytest.raises(Unavailable, match="not a database") as caught:
        Database.open(url_of(tmp_path))
    assert "damaged" in caught.value.hint


def test_a_full_disk(tmp_path: Path, database: Database) -> None:
    with pytest.raises(Unavailable, match="full") as caught, database.write() as connection:
        connection.rows("PRAGMA max_page_count = 1")
        connection.change("CREATE TABLE big (x)")
        connection.change("INSERT INTO big VALUES (zeroblob(1000000))")
    assert "free some space" in caught.value.hint
    assert "\n" not in str(caught.value)
    assert database.change_seq() == 0
    database.close()
