"""Passing capture requests on: one slow, ended or failing stream is nobody else's loss, nor is a busy database."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from commwatch.service.ingest.requests import CaptureRequests
from commwatch.service.store.contract import Store, StoreUnavailableError
from commwatch.service.store.opening import open_store
from commwatch.v1 import ingest_pb2
from tests.contract.samples import NOW, hello, key, run_id

DEADLINE_S = 20.0
Body = Callable[[CaptureRequests, Store], Awaitable[None]]


class Stream:
    """Takes what is sent; ``open`` is cleared while it takes nothing, ``error`` is raised instead of taking."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.took = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None

    async def send(self, response: ingest_pb2.ReportResponse) -> None:
        await self.open.wait()
        if self.error is not None:
            raise self.error
        self.numbers.append(response.capture.number)
        self.took.set()

    async def taken(self) -> None:
        await asyncio.wait_for(self.took.wait(), DEADLINE_S)


def serve(path: Path, body: Body) -> None:
    """Two ranks of one run that said hello; each is asked once."""
    store = open_store(f"sqlite:///{path / 'new.db'}", migrate=True)
    for rank in (0, 1):
        store.open_stream(hello(rank=rank, world_size=2), NOW)
    store.ask_captures(run_id(1), [0, 1], 2, "Ada", NOW)

    async def main() -> None:
        with ThreadPoolExecutor(2) as readers:
            await body(CaptureRequests(store, readers, every_s=0.01), store)

    asyncio.run(main())
    store.close()


def states(store: Store) -> list[str]:
    return [request.state for request in store.capture_requests(run_id(1))]


async def until(holds: Callable[[], bool]) -> None:
    async def look() -> None:
        while not holds():  # noqa: ASYNC110  # what it waits for is in a database
            await asyncio.sleep(0.005)

    await asyncio.wait_for(look(), DEADLINE_S)


def test_a_stream_that_takes_nothing_holds_up_no_other(tmp_path: Path) -> None:
    async def body(requests: CaptureRequests, store: Store) -> None:
        stuck, free = Stream(), Stream()
        stuck.open.clear()
        with requests.to(key(rank=0), stuck.send), requests.to(key(rank=1), free.send):
            for _ in range(3):
                await requests.pass_on()
            await free.taken()
            await until(lambda: states(store) == ["asked", "sent"])
            stuck.open.set()
            await stuck.taken()
            await until(lambda: states(store) == ["sent", "sent"])
            await requests.pass_on()
        # However often the store was asked.
        assert (stuck.numbers, free.numbers) == ([1], [1])

    serve(tmp_path, body)


@pytest.mark.parametrize("error", [asyncio.InvalidStateError("RPC already finished."), RuntimeError("odd")])
def test_what_a_stream_did_not_take_is_not_sent_and_comes_again(tmp_path: Path, error: Exception) -> None:
    async def body(requests: CaptureRequests, store: Store) -> None:
        failing = Stream()
        failing.error = error
        with requests.to(key(), failing.send):
            await requests.pass_on()
            await until(lambda: not requests._streams[key()].writing)
        assert states(store) == ["asked", "asked"]
        working = Stream()
        with requests.to(key(), working.send):
            await requests.pass_on()
            await working.taken()
        assert working.numbers == [1]

    serve(tmp_path, body)


def test_what_was_written_while_the_database_was_busy_is_marked_later_and_not_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commwatch.service.store.database.BUSY_TIMEOUT_MS", 20)

    async def body(requests: CaptureRequests, store: Store) -> None:
        stream = Stream()
        other = sqlite3.connect(tmp_path / "new.db", isolation_level=None)
        with requests.to(key(), stream.send):
            other.execute("BEGIN IMMEDIATE")
            await requests.pass_on()
            await stream.taken()
            await until(lambda: not requests._streams[key()].writing)
            assert states(store) == ["asked", "asked"]
            with pytest.raises(StoreUnavailableError):
                await requests.pass_on()
            other.execute("ROLLBACK")
            await requests.pass_on()
        other.close()
        assert (stream.numbers, states(store)) == ([1], ["sent", "asked"])

    serve(tmp_path, body)


def test_it_works_on_after_the_database_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(requests: CaptureRequests, store: Store) -> None:
        stream = Stream()
        asked = []

        def failing_once(run_ids: set[str]) -> object:
            asked.append(run_ids)
            if len(asked) < 3:
                raise (StoreUnavailableError("busy"), KeyError("bug"))[len(asked) - 1]
            return type(store).open_requests(store, run_ids)

        monkeypatch.setattr(store, "open_requests", failing_once)
        with requests.to(key(), stream.send):
            working = asyncio.create_task(requests.run())
            await stream.taken()
            working.cancel()
        assert asked[:3] == [{run_id(1)}] * 3

    serve(tmp_path, body)
