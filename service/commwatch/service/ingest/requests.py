"""Passes capture requests on to the ranks that are connected here, whichever replica was asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field

from grpc import aio

from commwatch.service.domain.records import RankKey
from commwatch.service.ingest.repeats import Repeats
from commwatch.service.store.contract import OpenRequest, Store, StoreError
from commwatch.v1 import ingest_pb2

Send = Callable[[ingest_pb2.ReportResponse], Awaitable[None]]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """One connected rank: what is being written to its stream, and what was, by number."""

    send: Send
    writing: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)


class CaptureRequests:
    """Asks the store every ``every_s`` seconds for the open requests of all connected ranks together.

    Each is written once to a stream, and again to the next stream of its rank while it is not answered. It is marked
    sent after it was written. A stream that takes nothing holds up no other. Used from one event loop.
    """

    def __init__(self, store: Store, readers: Executor, *, every_s: float) -> None:
        self._store = store
        self._readers = readers
        self._every_s = every_s
        self._streams: dict[RankKey, _Stream] = {}
        self._failures = Repeats(log)

    @contextmanager
    def to(self, key: RankKey, send: Send) -> Iterator[None]:
        """A rank is connected while the block runs."""
        stream = self._streams[key] = _Stream(send)
        try:
            yield
        finally:
            del self._streams[key]
            for task in stream.writing.values():
                task.cancel()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            if not self._streams:
                continue
            try:
                await self.pass_on()
            except StoreError as error:
                self._failures.warning("reading capture requests failed", error)
            except Exception as error:  # noqa: BLE001  # the edge: requests must be looked for again whatever happened
                self._failures.warning("passing capture requests on failed", error)

    async def pass_on(self) -> None:
        """Begin to write what is new, and mark what was written. Raises StoreError."""
        runs = {key.run_id for key in self._streams}
        found = await asyncio.get_running_loop().run_in_executor(self._readers, self._store.open_requests, runs)
        unmarked = []
        for request in found:
            stream = self._streams.get(request.key)
            if stream is None:
                continue
            if request.number in stream.written:
                # Its stream got it, but the database could not be told then.
                unmarked += [] if request.sent else [request]
            elif request.number not in stream.writing:
                stream.writing[request.number] = asyncio.create_task(self._write(stream, request))
        if unmarked:
            await self._mark(unmarked)

    async def _write(self, stream: _Stream, request: OpenRequest) -> None:
        message = ingest_pb2.CaptureRequest(number=request.number, steps=request.steps)
        try:
            await stream.send(ingest_pb2.ReportResponse(capture=message))
            stream.written.add(request.number)
            await self._mark([request])
        except (aio.BaseError, asyncio.InvalidStateError):
            return  # The stream ended: its rank gets the request from the next one.
        except Exception as error:  # noqa: BLE001  # the edge of a task that nobody waits for
            self._failures.warning("passing a capture request on failed", error)
        finally:
            stream.writing.pop(request.number, None)

    async def _mark(self, requests: Sequence[OpenRequest]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._readers, self._store.mark_sent, requests)
