"""The connection to the database: engine, transactions and errors. The one place that knows SQLite's particulars."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from commwatch.service.store.contract import StoreError, StoreUnavailableError

BUSY_TIMEOUT_MS = 5_000
POOL_SIZE = 16
"""Connections that are kept open."""
POOL_OVERFLOW = 48
"""Connections beyond them at busy times: more than the threads that read, those of HTTP (40) included."""
_CHUNK = 500
_RETRY_S = 0.01


class Database:
    """One database: transactions for readers, and one writer at a time.

    Every error of the database itself becomes StoreUnavailableError. Broken constraints and wrong SQL are bugs here
    and stay what they are.
    """

    def __init__(self, url: str) -> None:
        shown = url
        try:
            parsed = make_url(url)
            shown = parsed.render_as_string(hide_password=True)
            self.sqlite = parsed.get_backend_name() == "sqlite"
            self._engine = create_engine(
                parsed, pool_size=POOL_SIZE, max_overflow=POOL_OVERFLOW, pool_timeout=BUSY_TIMEOUT_MS / 1000
            )
        except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
            raise StoreError(f"{shown!r} is not a database this release can open ({error}). Use --db PATH.") from None
        self._write_lock = threading.Lock()
        if self.sqlite:
            _prepare_sqlite(self._engine)
        self._writer = self._engine.execution_options(commwatch_writes=True)
        # exec_driver_sql takes the driver's own placeholders: "?" here, "%s" in psycopg.
        self._placeholder = "?" if self._engine.dialect.paramstyle == "qmark" else "%s"

    def close(self) -> None:
        """Release every connection. Idempotent."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database."""
        with _translated(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is committed when the block ends and rolled back when it raises."""
        if not self._write_lock.acquire(timeout=2 * BUSY_TIMEOUT_MS / 1000):
            raise StoreUnavailableError("The database was busy with another write for 10 s. Nothing was stored.")
        try:
            with _translated(), self._writer.begin() as connection:
                yield connection
        finally:
            self._write_lock.release()

    def many(self, connection: Connection, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Run a statement with "?" placeholders for each row, without building parameters row by row."""
        if rows:
            if self._placeholder != "?":
                sql = sql.replace("?", self._placeholder)
            connection.exec_driver_sql(sql, list(rows))


def insert_sql(table: Table, *columns: str) -> str:
    """INSERT of the columns, all unless named, in the order of the schema; rows whose key exists stay as they are."""
    names = columns or tuple(column.name for column in table.columns)
    key = ", ".join(column.name for column in table.primary_key.columns)
    values = ", ".join("?" * len(names))
    return f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({values}) ON CONFLICT ({key}) DO NOTHING"  # noqa: S608  # names of the schema, no values


def chunks(values: Sequence[str]) -> Iterator[Sequence[str]]:
    """Pieces that fit in one IN list of every database."""
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]


@contextmanager
def _translated() -> Generator[None]:
    try:
        yield
    except OperationalError as error:
        raise StoreUnavailableError(f"The database cannot answer: {error.orig}. Nothing was stored.") from error
    except PoolTimeoutError as error:
        raise StoreUnavailableError("Every connection to the database is in use. Nothing was stored.") from error
    except DBAPIError as error:
        if error.connection_invalidated:
            raise StoreUnavailableError(f"The database went away: {error.orig}. Nothing was stored.") from error
        raise


def _use_wal(cursor: Any) -> None:
    """Switch to WAL. Two processes that switch a new file at once get "locked" without SQLite's own waiting."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:  # noqa: PERF203  # it waits on purpose
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        # The driver would begin transactions on its own, only before some statements: "begin" below does it always.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        _use_wal(cursor)
        # An acknowledgement promises that the service may be killed. With NORMAL a commit is in the kernel's hands
        # when it returns, which SIGKILL cannot undo; FULL would add a disk flush to each commit, for power loss
        # alone. After a power loss WAL with NORMAL loses the newest commits but is never corrupt or half applied:
        # cursor and content of a stream go together.
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # IMMEDIATE takes the write lock at once: waiting for it works then, upgrading a read snapshot later does not.
        writes = connection.get_execution_options().get("commwatch_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
