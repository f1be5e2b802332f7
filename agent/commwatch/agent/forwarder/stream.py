"""One stream to the service, as ``ingest.proto`` describes it.

Go-back-N: the service applies frames in order and acknowledges what it committed; after Want and BackOff everything
behind the last acknowledged frame is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from commwatch.agent.forwarder.closing import goodbye, progress
from commwatch.agent.forwarder.requests import Requests
from commwatch.agent.spool.reader import SpoolReader
from commwatch.v1 import ingest_pb2

LOOK_S = 0.1
STATUS_LIMIT_S = 1.0
SHORTEST_WAIT_MS, LONGEST_WAIT_MS = 50, 60_000
MIN_MESSAGE_BYTES = 64 * 1024

_log = logging.getLogger("commwatch.forwarder")
_Answer = TypeVar("_Answer")


class StreamBrokenError(Exception):
    """The stream ended before everything was acknowledged: another one may do better."""


class UndeliverableError(Exception):
    """The service will never take this spool as it is. The spool is left."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``answer_s``: a write, the welcome, or the answer to what was sent takes no longer, or the stream is given up."""

    answer_s: float = 20.0
    batch_frames: int = 256
    batch_bytes: int = 512 * 1024
    window_frames: int = 4096


class RankStream:
    """Sends what ``reader`` holds over ``call``. ``progressed`` is called when something new was acknowledged."""

    def __init__(
        self,
        reader: SpoolReader,
        call: Any,
        *,
        ended: Callable[[], bool],
        progressed: Callable[[], None],
        heartbeat_s: float,
        limits: Limits,
    ) -> None:
        self._reader = reader
        self._call = call
        self._ended = ended
        self._progressed = progressed
        self._heartbeat_s = heartbeat_s
        self._limits = limits
        self._message_bytes = MIN_MESSAGE_BYTES
        self._acked = 0
        self._sent = 0
        self._next = 1
        self._requests = Requests()
        self._wanted: set[bytes] = set()
        self._defined_at = -1
        self._wait_s = 0.0
        self._said_goodbye = False
        self._finished = False
        self._beat_at = 0.0
        self._heard_at = time.monotonic()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Returns when all is acknowledged. Raises StreamBrokenError, UndeliverableError, SpoolError or OSError."""
        await self._write(hello=self._reader.hello)
        await self._welcome()
        receiver = asyncio.ensure_future(self._receive())
        try:
            while not self._finished:
                if receiver.done():
                    receiver.result()
                    raise StreamBrokenError("the service ended it")
                await self._turn()
        finally:
            receiver.cancel()
            await asyncio.gather(receiver, return_exceptions=True)

    async def _welcome(self) -> None:
        response = await self._answered(self._call.read())
        if response is grpc.aio.EOF or response.WhichOneof("message") != "welcome":
            raise StreamBrokenError("it did not begin with a welcome")
        self._acked = self._sent = response.welcome.acked_frame
        self._next = self._acked + 1
        self._message_bytes = max(MIN_MESSAGE_BYTES, response.welcome.max_message_bytes)
        if self._acked > self._reader.last_number():
            raise UndeliverableError(
                f"the service holds {self._acked} frames of this rank, which are not of this spool: two launches had "
                "the same COMMWATCH_RUN_ID"
            )

    async def _turn(self) -> None:
        """Do one thing, or wait for something to do."""
        gone = self._ended()
        if self._wait_s:
            wait_s, self._wait_s = self._wait_s, 0.0
            await asyncio.sleep(wait_s)
            self._rewind()
        elif self._wanted:
            if self._defined_at == self._acked:  # sending them did not help a moment ago
                await asyncio.sleep(LOOK_S)
            self._defined_at = self._acked
            await self._define()
            self._rewind()
        elif await self._send_frames():
            return
        elif not gone and time.monotonic() >= self._beat_at and self._window():
            await self._beat()
        elif gone and self._acked == self._next - 1 and not self._said_goodbye:
            self._said_goodbye = True  # before the write: the answer may come during it
            await self._write(goodbye=goodbye(self._reader.counters()))
        else:
            await self._look()

    def _window(self) -> int:
        """Frames that may be sent before the next acknowledgement."""
        return self._limits.window_frames - (self._next - 1 - self._acked)

    async def _send_frames(self) -> bool:
        """Send the next batch, if there is one and the window is open."""
        most = min(self._limits.batch_frames, self._window())
        if most <= 0:
            return False
        size = min(self._limits.batch_bytes, self._message_bytes // 2)
        frames = self._reader.frames(self._next, max_frames=most, max_bytes=size)
        if not frames:
            return False
        if frames[0].number > self._next:
            frames = self._lost_frames(min(frames[0].number, self._next + most))
        elif frames[0].ByteSize() > self._message_bytes:
            _log.warning("frame %d has %d bytes: sent empty", self._next, frames[0].ByteSize())
            frames = [ingest_pb2.Frame(number=self._next)]
        self._next = frames[-1].number + 1
        self._sent = max(self._sent, self._next - 1)  # before the write: the answer may come during it
        await self._write(frames=ingest_pb2.FrameBatch(frames=frames))
        return True

    def _lost_frames(self, end: int) -> list[ingest_pb2.Frame]:
        """A service that forgot what it acknowledged gets empty frames in its place: it counts them as rejected."""
        _log.warning("frames %d to %d are not in %s: sent empty", self._next, end - 1, self._reader.folder)
        return [ingest_pb2.Frame(number=number) for number in range(self._next, end)]

    async def _beat(self) -> None:
        """Read the counters, send every frame that was written before them, then the counters."""
        counters = self._reader.counters()
        self._requests.pass_on(self._reader, counters)
        while await self._send_frames():
            if self._wanted or self._wait_s or not self._window():
                return
        self._beat_at = time.monotonic() + self._heartbeat_s
        await self._write(heartbeat=ingest_pb2.Heartbeat(progress=progress(counters)))

    async def _define(self) -> None:
        """Send the wanted bodies, patterns before what follows them.

        One that the spool does not hold, or that is too large, is sent empty: the service then rejects the frames that
        need it and goes on.
        """
        found = []
        while self._wanted:
            key = self._wanted.pop()
            body = self._reader.definition(key)
            if body is None or body.ByteSize() > self._message_bytes:
                _log.warning("body %s is %s: sent empty", key.hex(), "missing" if body is None else "too large")
                kind = ingest_pb2.DEFINITION_KIND_PATTERN if body is None else body.kind
                body = ingest_pb2.Definition(kind=kind, hash=key)
            found.append(body)
        batch: list[ingest_pb2.Definition] = []
        size = 0
        for body in sorted(found, key=lambda body: body.kind):
            if batch and size + len(body.content) > self._message_bytes // 2:
                await self._write(definitions=ingest_pb2.DefinitionBatch(definitions=batch))
                batch, size = [], 0
            batch.append(body)
            size += len(body.content)
        await self._write(definitions=ingest_pb2.DefinitionBatch(definitions=batch))

    async def _receive(self) -> None:
        while True:
            response = await self._answered(self._call.read(), limited=False)
            if response is grpc.aio.EOF:
                return
            self._heard_at = time.monotonic()
            kind = response.WhichOneof("message")
            if kind == "ack":
                self._take_ack(response.ack)
            elif kind == "want":
                self._wanted.update(response.want.hashes)
                self._said_goodbye = False
            elif kind == "back_off":
                wait_ms = min(max(response.back_off.wait_ms, SHORTEST_WAIT_MS), LONGEST_WAIT_MS)
                self._wait_s = wait_ms / 1000
                self._said_goodbye = False
                _log.info("the service asks to wait %d ms: %s", wait_ms, response.back_off.reason)
            elif kind == "capture":
                self._requests.take(response.capture)
            elif kind == "rejected":
                what = response.rejected.hash.hex() or f"frame {response.rejected.frame}"
                _log.warning("%s was rejected: %s", what, response.rejected.reason)
            self._changed.set()

    def _take_ack(self, ack: ingest_pb2.Ack) -> None:
        if ack.acked_frame > self._sent:
            raise StreamBrokenError(f"frame {ack.acked_frame} was acknowledged before it was sent")
        if ack.acked_frame > self._acked:
            self._acked = ack.acked_frame
            self._next = max(self._next, self._acked + 1)
            self._reader.delete_through(self._acked)
            self._progressed()
        if ack.goodbye and self._said_goodbye:
            self._finished = True

    async def _look(self) -> None:
        """Wait for an answer, or until it is time to look at the spool again."""
        if self._acked == self._next - 1 and not self._said_goodbye:
            self._heard_at = time.monotonic()  # nothing is owed
        elif time.monotonic() - self._heard_at > self._limits.answer_s:
            raise StreamBrokenError(f"no answer for {self._limits.answer_s:g} s")
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), LOOK_S)
        except asyncio.TimeoutError:
            return

    def _rewind(self) -> None:
        self._next = self._acked + 1
        self._heard_at = time.monotonic()

    async def _write(self, **message: Any) -> None:
        await self._answered(self._call.write(ingest_pb2.ReportRequest(**message)))

    async def _answered(self, waiting: Awaitable[_Answer], *, limited: bool = True) -> _Answer:
        """What the call answers. Its errors become this module's: grpc has several for a stream that is over."""
        try:
            return await asyncio.wait_for(waiting, self._limits.answer_s if limited else None)
        except asyncio.TimeoutError:
            raise StreamBrokenError(f"no answer for {self._limits.answer_s:g} s") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            failure = error
        try:  # a write to a stream that was over has no status of its own
            code = await asyncio.wait_for(self._call.code(), STATUS_LIMIT_S)
            details = await asyncio.wait_for(self._call.details(), STATUS_LIMIT_S)
        except asyncio.TimeoutError:
            raise StreamBrokenError(str(failure)) from None
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            raise UndeliverableError(f"refused this rank: {details}")
        raise StreamBrokenError(f"{code.name}: {details}")
