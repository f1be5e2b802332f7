"""Opening a store: which database, and whether its schema is the one this release works with."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError

from commwatch import migrations
from commwatch.service.store.contract import SchemaError, StoreError
from commwatch.service.store.database import Database
from commwatch.service.store.sql import SqlStore


def database_url(db: str) -> str:
    """The URL of a database given as URL or as the path of a SQLite file."""
    return db if "://" in db else f"sqlite:///{Path(db).expanduser().resolve()}"


def shown_url(url: str) -> str:
    """The URL without its password, for messages."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url


def open_store(url: str, *, migrate: bool) -> SqlStore:
    """Open a database and check its schema; with ``migrate``, create or upgrade it first.

    Raises SchemaError (older without ``migrate``, newer, or someone else's tables) and StoreError (cannot be opened).
    The folder of a SQLite file is created.
    """
    _make_folder(url)
    database = Database(url)
    try:
        _check(database, url, migrate)
    except DatabaseError as error:
        database.close()
        raise StoreError(
            f"{shown_url(url)} is not a database commwatch can read ({error.orig}). "
            "Name another file with --db, or move this one away."
        ) from error
    except StoreError as error:
        database.close()
        if isinstance(error, SchemaError):
            raise
        raise StoreError(
            f"Cannot open {shown_url(url)}: {error} Check the path and its permissions, or name one with --db."
        ) from error
    return SqlStore(database)


def _make_folder(url: str) -> None:
    try:
        parsed = make_url(url)
    except ArgumentError:
        return  # Database says so, in words.
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        return
    folder = Path(parsed.database).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"Cannot create the folder {folder}: {error.strerror}. Name another file with --db."
        ) from error


def _check(database: Database, url: str, migrate: bool) -> None:
    with database.reading() as connection:
        revision = migrations.current(connection)
        foreign = revision is None and inspect(connection).get_table_names() != []
    if foreign:
        raise SchemaError(f"{shown_url(url)} holds tables that are not commwatch's. Name another database with --db.")
    if revision is not None and not migrations.knows(revision):
        raise SchemaError(
            f"{shown_url(url)} has schema {revision}, newer than this release's {migrations.head()}. "
            "Upgrade commwatch (pip install --upgrade 'commwatch[service]'), or name another database with --db."
        )
    if revision == migrations.head():
        return
    if not migrate:
        raise SchemaError(
            f"{shown_url(url)} has schema {revision or 'none'}, this release needs {migrations.head()}. "
            "Run `commwatch serve`, which upgrades it."
        )
    with database.writing() as connection:
        # Another process may have been first: with the lock held, upgrading to head is then nothing to do.
        migrations.upgrade(connection)
