from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path

import pytest

from commwatch.service.ingest.repeats import Repeats
from commwatch.service.ingest.writer import MAX_GROUP, QueueFullError, Writer
from commwatch.service.store.contract import StoreUnavailableError, StreamWrite
from commwatch.service.store.opening import open_store
from tests.contract.samples import NOW, goodbye, hello, key, pattern, progress, run_id


class Heard:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def run_changed(self, run_id: str) -> None:
        self.events.append(("changed", run_id))

    def run_progressed(self, run_id: str) -> None:
        self.events.append(("progressed", run_id))


def test_a_full_queue_refuses_and_closing_writes_what_waits(tmp_path: Path) -> None:
    async def main() -> None:
        store = open_store(f"sqlite:///{tmp_path / 'new.db'}", migrate=True)
        heard = Heard()
        writer = Writer(store, queue_limit=2, clock=lambda: NOW, listener=heard)
        assert await writer.open_stream(hello()) == 0
        other = sqlite3.connect(tmp_path / "new.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        # While the database is locked one group of writes is with the thread, two fill the queue.
        waiting = [asyncio.create_task(writer.write(StreamWrite(key(), "default", goodbye=goodbye())))]
        full: QueueFullError | None = None
        for _ in range(1000):
            await asyncio.sleep(0)
            task = asyncio.create_task(writer.write(StreamWrite(key(), "default", progress=progress())))
            await asyncio.sleep(0)
            if task.done():
                with pytest.raises(QueueFullError, match="2 writes are waiting") as refused:
                    task.result()
                full = refused.value
                break
            waiting.append(task)
        assert full is not None
        assert 2 <= len(waiting) <= 2 + MAX_GROUP
        other.execute("ROLLBACK")
        other.close()
        await writer.close()
        assert [task.result() for task in waiting] == [None] * len(waiting)
        with pytest.raises(QueueFullError, match="shutting down"):
            await writer.write(StreamWrite(key(), "default"))
        assert ("changed", run_id(1)) in heard.events
        assert store.run(run_id(1)).state == "complete"  # type: ignore[union-attr]
        store.close()

    asyncio.run(main())


def test_an_unavailable_store_fails_everything_that_was_grouped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commwatch.service.store.database.BUSY_TIMEOUT_MS", 20)

    async def main() -> None:
        store = open_store(f"sqlite:///{tmp_path / 'new.db'}", migrate=True)
        heard = Heard()
        writer = Writer(store, queue_limit=8, clock=lambda: NOW, listener=heard)
        await writer.open_stream(hello())
        other = sqlite3.connect(tmp_path / "new.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        writes = [StreamWrite(key(), "default", [], [pattern(number)]) for number in (1, 2, 3)]
        results = await asyncio.gather(*(writer.write(write) for write in writes), return_exceptions=True)
        assert [type(result) for result in results] == [StoreUnavailableError] * 3
        assert writer.unavailable_at is not None
        other.execute("ROLLBACK")
        other.close()
        await asyncio.gather(*(writer.write(write) for write in writes))
        await writer.close()
        assert len(store.definitions("default", [item.hash for write in writes for item in write.definitions])) == 3
        assert heard.events == []
        store.close()

    asyncio.run(main())


def test_repeated_failures_are_logged_once_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    repeats = Repeats(logging.getLogger("commwatch.test"), lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            repeats.warning("it failed", ValueError("x"))
        repeats.warning("it failed", KeyError("y"))
        now[0] = 10.0
        repeats.warning("it failed", ValueError("x"))
    assert [record.getMessage() for record in caplog.records] == [
        "it failed error='x' repeated=0",
        "it failed error=\"'y'\" repeated=0",
        "it failed error='x' repeated=4",
    ]
