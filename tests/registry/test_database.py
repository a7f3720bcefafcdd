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
from sqlalchemy import event, text

from manylora.errors import InvalidSettings, Unavailable
from manylora.registry import migrations
from manylora.registry.database import Database
from manylora.registry.tables import metadata


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder / 'home' / 'registry.db'}"


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database.open(url_of(tmp_path))


def test_the_migrations_lead_to_the_tables(database: Database) -> None:
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        indexes = connection.dialect.get_indexes(connection, "versions")
        assert [index["name"] for index in indexes] == ["ix_versions_digest"]
    database.close()


def test_the_list_of_revisions_is_alembics() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)
    assert tuple(reversed([step.revision for step in script.walk_revisions()])) == migrations.REVISIONS
    assert script.get_current_head() == migrations.HEAD


def test_sqlite_is_opened_for_several_processes(database: Database) -> None:
    with database.read() as connection:
        answers = [
            connection.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "foreign_keys", "synchronous", "busy_timeout")
        ]
    assert answers == ["wal", 1, 2, 30_000]
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
            assert connection.execute(text("SELECT seq FROM change_counter")).scalar() == 0
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert database.change_seq() == 2
    database.close()


def test_a_database_from_a_newer_manylora_is_left_alone(tmp_path: Path, database: Database) -> None:
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
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
    @event.listens_for(database._engine, "connect", insert=False)
    def limit(connection: object, _record: object) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # type: ignore[attr-defined]

    database._engine.dispose()
    with pytest.raises(Unavailable, match="full") as caught, database.write() as connection:
        connection.execute(text("CREATE TABLE big (x)"))
        connection.execute(text("INSERT INTO big VALUES (zeroblob(1000000))"))
    assert "free some space" in caught.value.hint
    assert "\n" not in str(caught.value)
    assert database.change_seq() == 0
    database.close()
