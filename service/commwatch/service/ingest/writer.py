"""One thread that writes: what many streams send at the same time is committed together."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from commwatch.service.domain.records import Hello
from commwatch.service.store.contract import Store, StoreUnavailableError, StreamWrite

MAX_GROUP = 64
"""Writes in one transaction."""


class QueueFullError(Exception):
    """The writer is behind. Nothing was stored; send again later."""


class RunListener(Protocol):
    """Told about runs on the event loop, after the commit. Must return at once and not raise."""

    def run_changed(self, run_id: str) -> None:
        """Frames or a goodbye were stored."""

    def run_progressed(self, run_id: str) -> None:
        """Only counters moved: steps of open ranges."""


@dataclass(slots=True)
class _Job:
    content: StreamWrite | Hello
    result: asyncio.Future[int]


@dataclass(slots=True)
class _Barrier:
    """The end of the queue."""


class Writer:
    """Stores hellos and writes in the order they came. Used from one event loop.

    ``clock`` gives Unix nanoseconds.
    """

    def __init__(self, store: Store, *, queue_limit: int, clock: Callable[[], int], listener: RunListener) -> None:
        self._store = store
        self._clock = clock
        self._listener = listener
        self._queue: queue.Queue[_Job | _Barrier] = queue.Queue(queue_limit)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="commwatch-writer", daemon=True)
        self._closed = False
        self.unavailable_at: float | None = None
        """When the store was last unavailable, on the monotonic clock in seconds."""
        self._thread.start()

    async def open_stream(self, hello: Hello) -> int:
        """The cursor of a rank. Raises QueueFullError, StoreUnavailableError, and ValueError as the store does."""
        return await self._submit(hello)

    async def write(self, write: StreamWrite) -> None:
        """Return when the write is committed. Raises QueueFullError, StoreUnavailableError; others are bugs."""
        await self._submit(write)

    async def close(self) -> None:
        """Write what is queued, then end the thread. What comes afterwards is refused. Idempotent."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._queue.put, _Barrier())
        await asyncio.to_thread(self._thread.join)

    async def _submit(self, content: StreamWrite | Hello) -> int:
        if self._closed:
            raise QueueFullError("the service is shutting down")
        job = _Job(content, self._loop.create_future())
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            raise QueueFullError(f"{self._queue.maxsize} writes are waiting") from None
        return await job.result

    def _run(self) -> None:
        while True:
            first = self._queue.get()
            if isinstance(first, _Barrier):
                return
            group, ended = [first], False
            while len(group) < MAX_GROUP and not ended:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if isinstance(more, _Barrier):
                    ended = True
                else:
                    group.append(more)
            self._store_group(group)
            if ended:
                return

    def _store_group(self, group: list[_Job]) -> None:
        """Neighbouring writes share a transaction; a hello has its own."""
        writes: list[_Job] = []
        for job in group:
            if isinstance(job.content, Hello):
                self._apply(writes)
                writes = []
                self._settle([job], self._attempt(partial(self._store.open_stream, job.content)))
            else:
                writes.append(job)
        self._apply(writes)

    def _apply(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        writes = [job.content for job in jobs if isinstance(job.content, StreamWrite)]
        outcome = self._attempt(partial(self._store.apply, writes))
        if isinstance(outcome, Exception) and not isinstance(outcome, StoreUnavailableError) and len(jobs) > 1:
            # One of them is at fault: the others must not suffer for it.
            for job in jobs:
                self._apply([job])
            return
        self._settle(jobs, outcome)

    def _attempt(self, store: Callable[[int], int | None]) -> int | Exception:
        try:
            return store(self._clock()) or 0
        except StoreUnavailableError as error:
            self.unavailable_at = time.monotonic()
            return error
        except Exception as error:  # noqa: BLE001  # the thread must outlive every write: the stream that sent it is told
            return error

    def _settle(self, jobs: list[_Job], outcome: int | Exception) -> None:
        self._loop.call_soon_threadsafe(self._deliver, jobs, outcome)

    def _deliver(self, jobs: list[_Job], outcome: int | Exception) -> None:
        for job in jobs:
            if job.result.done():
                continue  # The stream that waited is gone: taken over, or cut.
            if isinstance(outcome, Exception):
                job.result.set_exception(outcome)
            else:
                job.result.set_result(outcome)
        if isinstance(outcome, Exception):
            return
        writes = [job.content for job in jobs if isinstance(job.content, StreamWrite)]
        changed = {write.key.run_id for write in writes if write.frames or write.goodbye}
        for run_id in sorted(changed):
            self._listener.run_changed(run_id)
        for run_id in sorted({write.key.run_id for write in writes if write.progress} - changed):
            self._listener.run_progressed(run_id)
