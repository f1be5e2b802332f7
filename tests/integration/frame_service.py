"""A gRPC service that keeps the rules of ``ingest.proto`` in memory and can be told to fail in one way at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from commwatch.v1 import ingest_pb2, ingest_pb2_grpc

LIMIT_S = 60.0
MAX_MESSAGE_BYTES = 1024 * 1024


@dataclass
class Kept:
    """What is committed: it outlives the service. ``beats`` are (highest frame that came, steps) of heartbeats."""

    frames: list[ingest_pb2.Frame] = field(default_factory=list)
    bodies: dict[bytes, bytes] = field(default_factory=dict)
    beats: list[tuple[int, int]] = field(default_factory=list)
    hellos: list[ingest_pb2.Hello] = field(default_factory=list)
    goodbyes: list[ingest_pb2.Goodbye] = field(default_factory=list)
    wants: int = 0
    newest: int = 0


Fault = Callable[[ingest_pb2.ReportRequest], "ingest_pb2.ReportResponse | None"]
"""Looks at a message before it is taken. A response is sent instead of taking it; ``CutError`` ends the stream."""


class CutError(Exception):
    """Raised by a fault: the stream breaks here."""


class FrameService:
    """Start it, stop it, start it again on the same port. ``fault`` may be set at any time."""

    def __init__(self) -> None:
        self.kept = Kept()
        self.fault: Fault | None = None
        self.port = 0
        self._changed = threading.Condition()
        self._server: Any = None

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen on a free port, or on the one it had."""
        server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        ingest_pb2_grpc.add_IngestServiceServicer_to_server(_Servicer(self), server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        server.start()
        self._server = server

    def stop(self) -> None:
        """Break every stream."""
        if self._server is not None:
            self._server.stop(0).wait(LIMIT_S)
            self._server = None

    def until(self, holds: Callable[[Kept], bool]) -> None:
        """Wait for something to be true of what is kept. Raises AssertionError at the deadline."""
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self.kept), LIMIT_S), self.kept

    def numbers(self) -> list[int]:
        """Numbers of the stored frames, in the order they were stored."""
        return [frame.number for frame in self.kept.frames]

    def report(self, requests: Iterator[ingest_pb2.ReportRequest], context: Any) -> Iterator[Any]:
        """One stream."""
        try:
            for request in requests:
                answer = self.fault(request) if self.fault else None
                with self._changed:
                    answers = [answer] if answer else list(self._take(request))
                    self._changed.notify_all()
                yield from answers
        except CutError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    def _take(self, request: ingest_pb2.ReportRequest) -> Iterator[ingest_pb2.ReportResponse]:
        kept = self.kept
        kind = request.WhichOneof("message")
        if kind == "hello":
            kept.hellos.append(request.hello)
            yield ingest_pb2.ReportResponse(
                welcome=ingest_pb2.Welcome(acked_frame=len(kept.frames), max_message_bytes=MAX_MESSAGE_BYTES)
            )
        elif kind == "definitions":
            kept.bodies.update({body.hash: body.content for body in request.definitions.definitions})
        elif kind == "heartbeat":
            kept.beats.append((kept.newest, request.heartbeat.progress.steps))
        elif kind == "goodbye":
            kept.goodbyes.append(request.goodbye)
            yield self._ack(goodbye=True)
        else:
            yield from self._take_frames(request.frames.frames)

    def _take_frames(self, frames: Any) -> Iterator[ingest_pb2.ReportResponse]:
        before = len(self.kept.frames)
        for frame in frames:
            self.kept.newest = max(self.kept.newest, frame.number)
            if frame.number != len(self.kept.frames) + 1:
                continue
            key = frame.range.pattern_hash
            if key and key not in self.kept.bodies:
                self.kept.wants += 1
                yield ingest_pb2.ReportResponse(want=ingest_pb2.Want(hashes=[key]))
                self.kept.newest = max(self.kept.newest, frames[-1].number)
                break
            self.kept.frames.append(frame)
            if frame.WhichOneof("content") is None:
                yield ingest_pb2.ReportResponse(rejected=ingest_pb2.Rejected(frame=frame.number, reason="empty"))
        if len(self.kept.frames) > before:
            yield self._ack()

    def _ack(self, *, goodbye: bool = False) -> ingest_pb2.ReportResponse:
        return ingest_pb2.ReportResponse(ack=ingest_pb2.Ack(acked_frame=len(self.kept.frames), goodbye=goodbye))


class _Servicer(ingest_pb2_grpc.IngestServiceServicer):
    def __init__(self, service: FrameService) -> None:
        self._service = service

    def Report(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802  the generated name
        """One stream."""
        return self._service.report(request_iterator, context)
