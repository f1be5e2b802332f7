"""The protocol of one stream, as ``ingest.proto`` describes it. One message at a time: read, store, answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from commwatch.service.domain.captures import Capture
from commwatch.service.domain.records import Definition, Frame, Hello, Lines, RankKey, Shapes
from commwatch.service.ingest import wire
from commwatch.service.ingest.bodies import read_definition
from commwatch.service.ingest.captures import CaptureLimits
from commwatch.service.ingest.checks import HASH_BYTES, MalformedError, require
from commwatch.service.ingest.known import (
    KnownDefinitions,
    Outline,
    check_follower,
    check_frame,
    outline_of,
    references,
)
from commwatch.service.ingest.writer import QueueFullError, Writer
from commwatch.service.store.contract import RejectedFrame, StoreUnavailableError, StreamWrite
from commwatch.v1 import ingest_pb2

MAX_WANTED = 256
"""Hashes in one Want."""
MAX_REFUSED = 1_024
"""Hashes of malformed definitions remembered for a stream."""

Send = Callable[[ingest_pb2.ReportResponse], Awaitable[None]]
StoredParts = Callable[[RankKey], Awaitable[dict[int, dict[int, int]]]]
"""Records of each stored part of a rank's captures, by step and part. Raises StoreUnavailableError."""


@dataclass(slots=True)
class _Taken:
    """The part of a batch that can be stored, and what keeps the rest."""

    frames: list[Frame | RejectedFrame]
    wanted: list[str]


class Session:
    """One stream after its hello. ``send`` sends a response; ``stored_parts`` is asked at the first capture."""

    def __init__(
        self,
        hello: Hello,
        cursor: int,
        *,
        writer: Writer,
        known: KnownDefinitions,
        stored_parts: StoredParts,
        max_frame_bytes: int,
        back_off_ms: int,
        send: Send,
    ) -> None:
        self.key = hello.key
        self._project = hello.project
        self._cursor = cursor
        # Highest frame that came: a goodbye that overtakes frames which must come again is dropped with them.
        self._seen = cursor
        self._writer = writer
        self._known = known
        self._stored_parts = stored_parts
        self._capture_limits: CaptureLimits | None = None
        self._max_frame_bytes = max_frame_bytes
        self._back_off_ms = back_off_ms
        self._send = send
        self._refused: OrderedDict[str, str] = OrderedDict()

    async def take(self, message: ingest_pb2.ReportRequest) -> None:
        """Handle one message. Raises MalformedError when the stream cannot go on."""
        try:
            match message.WhichOneof("message"):
                case "frames":
                    await self._take_frames(message.frames.frames)
                case "definitions":
                    await self._take_definitions(message.definitions.definitions)
                case "heartbeat":
                    await self._take_heartbeat(message.heartbeat)
                case "goodbye":
                    await self._take_goodbye(message.goodbye)
                case "hello":
                    raise MalformedError("a second hello on one stream")
                case _:
                    pass  # A kind of message that a newer agent sends.
        except (QueueFullError, StoreUnavailableError) as error:
            back_off = ingest_pb2.BackOff(wait_ms=self._back_off_ms, reason=str(error))
            await self._send(ingest_pb2.ReportResponse(back_off=back_off))

    def _write(self) -> StreamWrite:
        return StreamWrite(self.key, self._project)

    async def _take_frames(self, messages: Sequence[ingest_pb2.Frame]) -> None:
        parsed = self._in_order(messages)
        if not parsed and not any(message.number <= self._cursor for message in messages):
            return  # Behind a gap: what is missing comes again, and these after it.
        taken = await self._resolve([await self._within_limits(frame) for frame in parsed])
        if taken.frames:
            write = self._write()
            write.frames = taken.frames
            await self._writer.write(write)
            self._cursor = taken.frames[-1].number
        for frame in taken.frames:
            if isinstance(frame, RejectedFrame):
                await self._reject(frame.reason, frame=frame.number)
        if taken.frames or not taken.wanted:
            await self._send(ingest_pb2.ReportResponse(ack=ingest_pb2.Ack(acked_frame=self._cursor)))
        if taken.wanted:
            hashes = [bytes.fromhex(hash_) for hash_ in taken.wanted[:MAX_WANTED]]
            await self._send(ingest_pb2.ReportResponse(want=ingest_pb2.Want(hashes=hashes)))

    def _in_order(self, messages: Sequence[ingest_pb2.Frame]) -> list[Frame | RejectedFrame]:
        """The frames right after the cursor. Those already stored and those behind a gap are left out."""
        parsed: list[Frame | RejectedFrame] = []
        for message in messages:
            self._seen = max(self._seen, message.number)
            expected = self._cursor + len(parsed) + 1
            if message.number == expected:
                parsed.append(self._parse(message))
            elif message.number > expected:
                break
        return parsed

    def _parse(self, message: ingest_pb2.Frame) -> Frame | RejectedFrame:
        try:
            size, limit = message.ByteSize(), self._max_frame_bytes
            require(size <= limit, f"the frame has {size} bytes, more than {limit}")
            return wire.read_frame(message)
        except MalformedError as error:
            return RejectedFrame(message.number, str(error))

    async def _within_limits(self, frame: Frame | RejectedFrame) -> Frame | RejectedFrame:
        """A capture counts together with the other parts of its step, those of earlier streams included."""
        if not isinstance(frame, Frame) or not isinstance(frame.content, Capture):
            return frame
        if self._capture_limits is None:
            self._capture_limits = CaptureLimits(await self._stored_parts(self.key))
        try:
            self._capture_limits.check(frame.content)
        except MalformedError as error:
            return RejectedFrame(frame.number, str(error))
        return frame

    async def _resolve(self, parsed: list[Frame | RejectedFrame]) -> _Taken:
        """Check frames against what they refer to, up to the first that refers to something unknown."""
        named = {hash_ for frame in parsed if isinstance(frame, Frame) for hash_ in references(frame)}
        outlines = await self._known.lookup(self._project, named) if named else {}
        taken = _Taken([], [])
        for frame in parsed:
            if isinstance(frame, Frame):
                missing = [hash_ for hash_ in references(frame) if hash_ not in outlines]
                refused = [self._refused[hash_] for hash_ in missing if hash_ in self._refused]
                if missing and not refused:
                    taken.wanted.extend(hash_ for hash_ in missing if hash_ not in taken.wanted)
                    continue
                checked: Frame | RejectedFrame = (
                    RejectedFrame(frame.number, refused[0]) if refused else _checked(frame, outlines)
                )
            else:
                checked = frame
            if not taken.wanted:
                taken.frames.append(checked)
        return taken

    async def _take_definitions(self, messages: Sequence[ingest_pb2.Definition]) -> None:
        """Store them at once: the frames that want them come again."""
        # Ranks that begin together are asked for the same bodies: what is stored by now is not read again.
        stored = await self._known.lookup(self._project, {message.hash.hex() for message in messages})
        read = [await self._read_definition(message) for message in messages if message.hash.hex() not in stored]
        bodies = {body.hash: body for body in read if body is not None}
        followers = [body for body in bodies.values() if isinstance(body, (Shapes, Lines))]
        patterns = {body.pattern_hash for body in followers}
        given = {hash_: outline_of(bodies[hash_]) for hash_ in patterns & set(bodies)}
        elsewhere = patterns - set(given)
        outlines = given | (await self._known.lookup(self._project, elsewhere) if elsewhere else {})
        for body in followers:
            if not await self._fits(body, outlines.get(body.pattern_hash)):
                del bodies[body.hash]
        if bodies:
            write = self._write()
            write.definitions = list(bodies.values())
            await self._writer.write(write)
            self._known.remember(self._project, bodies.values())

    async def _read_definition(self, message: ingest_pb2.Definition) -> Definition | None:
        try:
            return read_definition(message)
        except MalformedError as error:
            await self._refuse(message.hash, str(error))
            return None

    async def _fits(self, body: Shapes | Lines, pattern: Outline | None) -> bool:
        if pattern is None:
            return False  # Its frame names the pattern too: both are wanted when it comes again.
        try:
            check_follower(body, pattern)
        except MalformedError as error:
            await self._refuse(bytes.fromhex(body.hash), str(error))
            return False
        return True

    async def _take_heartbeat(self, message: ingest_pb2.Heartbeat) -> None:
        write = self._write()
        try:
            write.progress = wire.read_progress(message.progress)
        except MalformedError as error:
            await self._reject(f"heartbeat: {error}")
            return
        await self._writer.write(write)

    async def _take_goodbye(self, message: ingest_pb2.Goodbye) -> None:
        if self._seen > self._cursor:
            return  # Frames before it must come again, and it after them.
        write = self._write()
        try:
            write.goodbye = wire.read_goodbye(message)
        except MalformedError as error:
            await self._reject(f"goodbye: {error}")
            return
        await self._writer.write(write)
        await self._send(ingest_pb2.ReportResponse(ack=ingest_pb2.Ack(acked_frame=self._cursor, goodbye=True)))

    async def _refuse(self, hash_: bytes, reason: str) -> None:
        """Frames that refer to a malformed definition would be wanting it for ever: they are rejected too."""
        if len(hash_) == HASH_BYTES:
            self._refused[hash_.hex()] = reason
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        await self._reject(reason, hash_=hash_[:HASH_BYTES])

    async def _reject(self, reason: str, *, frame: int = 0, hash_: bytes = b"") -> None:
        rejected = ingest_pb2.Rejected(frame=frame, hash=hash_, reason=reason)
        await self._send(ingest_pb2.ReportResponse(rejected=rejected))


def _checked(frame: Frame, outlines: dict[str, Outline]) -> Frame | RejectedFrame:
    try:
        check_frame(frame, outlines)
    except MalformedError as error:
        return RejectedFrame(frame.number, str(error))
    return frame
