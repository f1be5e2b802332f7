"""Sends one rank's spool over one stream at a time, until everything and its goodbye are acknowledged.

Go-back-N: the service applies frames in order and acknowledges what it committed; after Want, BackOff or a broken
stream everything behind the last acknowledged frame is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from commwatch.agent.spool import page
from commwatch.agent.spool.reader import SpoolReader
from commwatch.v1 import ingest_pb2, ingest_pb2_grpc

BATCH_FRAMES = 256
BATCH_BYTES = 512 * 1024
WINDOW_FRAMES = 4096
POLL_S = 0.1
ANSWER_LIMIT_S = 20.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
MAX_WAIT_MS = 60_000
MIN_MESSAGE_BYTES = 64 * 1024

_log = logging.getLogger("commwatch.forwarder")

_OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),  # the service is asked directly
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]


class DeadlineError(Exception):
    """The rank ended and the service did not acknowledge everything in time. The spool is left."""


class UndeliverableError(Exception):
    """The service will never take this spool as it is. The spool is left."""


class Delivery:
    """``ended``: whether the rank is gone; ``deadline_s`` counts from then on. ``dial_s`` bounds the first jitter."""

    def __init__(
        self,
        reader: SpoolReader,
        endpoint: str,
        *,
        ended: Callable[[], bool],
        deadline_s: float,
        heartbeat_s: float,
        dial_s: float,
    ) -> None:
        self._reader = reader
        self._endpoint = endpoint
        self._ended = ended
        self._deadline_s = deadline_s
        self._heartbeat_s = heartbeat_s
        self._dial_s = dial_s
        self._gone_at: float | None = None
        self._wait_s = FIRST_WAIT_S
        self._acked = 0
        self._next = 1
        self._wanted: set[bytes] = set()
        self._back_off_s = 0.0
        self._said_goodbye = False
        self._finished = False
        self._changed = asyncio.Event()
        self._message_bytes = MIN_MESSAGE_BYTES

    def hasten(self, deadline_s: float) -> None:
        """Somebody wants this process to end: at most so many seconds after the rank ended."""
        self._deadline_s = min(self._deadline_s, deadline_s)

    async def run(self) -> None:
        """Returns when all is acknowledged. Raises DeadlineError, UndeliverableError or SpoolError."""
        await self._pause(random.uniform(0, self._dial_s))  # noqa: S311  jitter, not a secret
        while not self._finished:
            try:
                async with grpc.aio.insecure_channel(self._endpoint, options=_OPTIONS) as channel:
                    await self._stream(ingest_pb2_grpc.IngestServiceStub(channel))
            except (grpc.aio.AioRpcError, ConnectionError, asyncio.TimeoutError) as error:
                self._refused(error)
            except asyncio.InvalidStateError as error:  # the stream broke between two calls
                self._refused(error)
            if not self._finished:
                await self._pause(random.uniform(0, self._wait_s))  # noqa: S311  jitter, not a secret
                self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)

    def _refused(self, error: BaseException) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise UndeliverableError(f"{self._endpoint} refused this rank: {error.details()}")
            _log.info("stream to %s broke: %s: %s", self._endpoint, error.code().name, error.details())
        else:
            _log.info("stream to %s broke: %s: %s", self._endpoint, type(error).__name__, error)

    async def _stream(self, stub: Any) -> None:
        call = stub.Report()
        await self._write(call, hello=self._reader.hello)
        response = await asyncio.wait_for(call.read(), ANSWER_LIMIT_S)
        if response is grpc.aio.EOF or response.WhichOneof("message") != "welcome":
            raise ConnectionError("the service closed the stream before its welcome")
        self._wait_s = FIRST_WAIT_S
        self._acked = response.welcome.acked_frame
        self._next = self._acked + 1
        self._message_bytes = max(MIN_MESSAGE_BYTES, response.welcome.max_message_bytes)
        self._wanted.clear()
        self._back_off_s = 0.0
        self._said_goodbye = False
        receiver = asyncio.create_task(self._receive(call))
        try:
            await self._send(call, receiver)
        finally:
            receiver.cancel()
            call.cancel()

    async def _send(self, call: Any, receiver: asyncio.Task[None]) -> None:
        beat_at = 0.0
        while not self._finished:
            if receiver.done():
                receiver.result()
                raise ConnectionError("the service closed the stream")
            gone = self._rank_is_gone()
            if self._back_off_s:
                wait_s, self._back_off_s = self._back_off_s, 0.0
                await self._pause(wait_s)
                self._rewind()
            elif self._wanted:
                await self._define(call)
                self._rewind()
            elif await self._send_frames(call):
                continue
            elif not gone and time.monotonic() >= beat_at:
                beat_at = time.monotonic() + self._heartbeat_s
                await self._beat(call)
            elif gone and self._acked == self._next - 1 and not self._said_goodbye:
                await self._write(call, goodbye=_goodbye(self._reader.counters()))
                self._said_goodbye = True
            else:
                await self._look()

    async def _send_frames(self, call: Any) -> bool:
        """Send the next batch, if there is one and the window is open."""
        if self._next - 1 - self._acked >= WINDOW_FRAMES:
            return False
        frames = self._reader.frames(
            self._next, max_frames=BATCH_FRAMES, max_bytes=min(BATCH_BYTES, self._message_bytes // 2)
        )
        if not frames:
            return False
        if frames[0].number != self._next:
            raise UndeliverableError(f"frame {self._next} is missing in {self._reader.folder}")
        await self._write(call, frames=ingest_pb2.FrameBatch(frames=frames))
        self._next = frames[-1].number + 1
        return True

    async def _beat(self, call: Any) -> None:
        """Read the counters, then send every frame that was written before them, then the counters."""
        counters = self._reader.counters()
        while await self._send_frames(call):
            pass
        await self._write(call, heartbeat=ingest_pb2.Heartbeat(progress=_progress(counters)))

    async def _define(self, call: Any) -> None:
        batch: list[ingest_pb2.Definition] = []
        size = 0
        while self._wanted:
            key = self._wanted.pop()
            definition = self._reader.definition(key)
            if definition is None:
                raise UndeliverableError(
                    f"{self._reader.folder} does not hold the body {key.hex()} the service asked for"
                )
            if batch and size + len(definition.content) > self._message_bytes // 2:
                await self._write(call, definitions=ingest_pb2.DefinitionBatch(definitions=batch))
                batch, size = [], 0
            batch.append(definition)
            size += len(definition.content)
        await self._write(call, definitions=ingest_pb2.DefinitionBatch(definitions=batch))

    async def _receive(self, call: Any) -> None:
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                return
            kind = response.WhichOneof("message")
            if kind == "ack":
                self._acked = max(self._acked, response.ack.acked_frame)
                self._next = max(self._next, self._acked + 1)
                self._reader.delete_through(self._acked)
                if response.ack.goodbye and self._said_goodbye:
                    self._finished = True
            elif kind == "want":
                self._wanted.update(response.want.hashes)
            elif kind == "back_off":
                self._back_off_s = min(response.back_off.wait_ms, MAX_WAIT_MS) / 1000
                self._said_goodbye = False
                _log.info("the service asks to wait %.1f s: %s", self._back_off_s, response.back_off.reason)
            elif kind == "rejected":
                _log.warning("frame %d was rejected: %s", response.rejected.frame, response.rejected.reason)
            self._changed.set()

    async def _write(self, call: Any, **message: Any) -> None:
        await asyncio.wait_for(call.write(ingest_pb2.ReportRequest(**message)), ANSWER_LIMIT_S)

    async def _look(self) -> None:
        """Wait for an answer, or until it is time to look at the spool again."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), POLL_S)
        except asyncio.TimeoutError:
            self._check_deadline()

    async def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._rank_is_gone()
            self._check_deadline()
            await asyncio.sleep(min(left, POLL_S))

    def _rewind(self) -> None:
        self._next = self._acked + 1

    def _rank_is_gone(self) -> bool:
        if self._gone_at is None and self._ended():
            self._gone_at = time.monotonic()
        return self._gone_at is not None

    def _check_deadline(self) -> None:
        if self._gone_at is not None and time.monotonic() - self._gone_at > self._deadline_s:
            raise DeadlineError(f"{self._endpoint} did not take everything within {self._deadline_s:g} s")


def _progress(counters: page.Counters) -> ingest_pb2.Progress:
    return ingest_pb2.Progress(
        range=counters.range_number,
        last_step=counters.last_step,
        range_steps=counters.range_steps,
        steps=counters.steps,
        calls=counters.calls,
        dropped_calls=counters.dropped_calls,
        dropped_steps=counters.dropped_steps,
        reason=counters.reason,
    )


def _goodbye(counters: page.Counters) -> ingest_pb2.Goodbye:
    ending, detail = {
        page.CLEAN: (ingest_pb2.ENDING_CLEAN, counters.detail),
        page.EXCEPTION: (ingest_pb2.ENDING_EXCEPTION, counters.detail),
    }.get(counters.ending, (ingest_pb2.ENDING_LOST, "the process ended without a goodbye"))
    return ingest_pb2.Goodbye(ending=ending, detail=detail, progress=_progress(counters))
