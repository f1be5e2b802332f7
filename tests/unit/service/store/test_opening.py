from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from commwatch import migrations
from commwatch.service.store.contract import SchemaError, StoreError, StoreUnavailableError
from commwatch.service.store.database import Database
from commwatch.service.store.opening import database_url, open_store


def test_a_path_becomes_a_url(tmp_path: Path) -> None:
    assert database_url("postgresql://host/db") == "postgresql://host/db"
    assert database_url(str(tmp_path / "a.db")) == f"sqlite:///{tmp_path / 'a.db'}"


def test_an_empty_database_is_migrated_only_when_asked(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'deep' / 'folder' / 'new.db'}"
    with pytest.raises(SchemaError, match=r"has schema none, this release needs 0003. Run `commwatch serve`"):
        open_store(url, migrate=False)
    open_store(url, migrate=True).close()
    opened = open_store(url, migrate=False)
    assert opened.runs() == []
    opened.close()


def test_several_processes_may_migrate_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new.db'}"
    failures: list[Exception] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait(10)
        try:
            open_store(url, migrate=True).close()
        except Exception as error:  # noqa: BLE001  # reported by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    open_store(url, migrate=False).close()


def test_a_newer_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    open_store(f"sqlite:///{path}", migrate=True).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaError, match=r"has schema 9999, newer than this release's 0003. Upgrade commwatch"):
        open_store(f"sqlite:///{path}", migrate=True)


def test_another_programs_tables_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "foreign.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(SchemaError, match=r"holds tables that are not commwatch's"):
        open_store(f"sqlite:///{path}", migrate=True)
    with sqlite3.connect(path) as connection:
        assert [name for (name,) in connection.execute("SELECT name FROM sqlite_master")] == ["theirs"]


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"these are my notes, keep them" * 100)
    with pytest.raises(StoreError, match=r"notes.txt is not a database commwatch can read \(file is not a database\)"):
        open_store(f"sqlite:///{path}", migrate=True)
    assert path.read_bytes() == b"these are my notes, keep them" * 100


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"Cannot create the folder .*file/sub: Not a directory"):
        open_store(f"sqlite:///{tmp_path / 'file' / 'sub' / 'new.db'}", migrate=True)


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"Cannot open .*: The database cannot answer: unable to open database file"):
        open_store(f"sqlite:///{tmp_path}", migrate=True)


@pytest.mark.parametrize("url", ["nonsense://x", "mysql+nodriver://h/d", "://"])
def test_an_unknown_engine_is_refused_in_words(url: str) -> None:
    with pytest.raises(StoreError, match=r"is not a database this release can open"):
        open_store(url, migrate=True)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(StoreError) as refused:
        open_store("nonsense://ada:secret@host/db", migrate=True)
    assert "secret" not in str(refused.value)
    assert "nonsense://ada:***@host/db" in str(refused.value)


def test_commits_survive_the_process_and_constraints_hold(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'new.db'}")
    with database.writing() as connection:
        migrations.upgrade(connection)
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "foreign_keys")
        }
    assert pragmas == {"journal_mode": "wal", "foreign_keys": 1}
    database.close()


def test_a_database_locked_by_another_process_is_unavailable_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commwatch.service.store.database.BUSY_TIMEOUT_MS", 50)
    path = tmp_path / "new.db"
    store = open_store(f"sqlite:///{path}", migrate=True)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailableError, match=r"database is locked. Nothing was stored"):
        store.mark_lost(1, 2)
    assert store.runs() == []
    other.execute("ROLLBACK")
    assert store.mark_lost(1, 2) == []
    other.close()
    store.close()
