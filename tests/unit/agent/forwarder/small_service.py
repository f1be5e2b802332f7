"""A real gRPC server that keeps the rules of ``ingest.proto`` and that a test may make misbehave."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from commwatch.agent.forwarder.delivery import Delivery, Waits
from commwatch.agent.forwarder.stream import Limits
from commwatch.agent.spool.reader import SpoolReader
from commwatch.v1 import ingest_pb2, ingest_pb2_grpc

Answer = ingest_pb2.ReportResponse | grpc.StatusCode | str | None
"""What a test does instead of the rules: answer this, end the stream with this, "ignore" the message; None: nothing."""

SPEEDY = Waits(deadline=20.0, heartbeat=0.02, dial=0.0, first=0.01, longest=0.05)


class SmallService(ingest_pb2_grpc.IngestServiceServicer):
    """What it stored. ``interfere`` gets (number of the stream, message) before the rules see it."""

    def __init__(self, interfere: Callable[[int, ingest_pb2.ReportRequest], Answer] = lambda _stream, _message: None):
        self.interfere = interfere
        self.max_message_bytes = 8 * 1024 * 1024
        self.cursor = 0
        self.frames: list[ingest_pb2.Frame] = []
        self.rejected: list[int] = []
        self.bodies: dict[bytes, ingest_pb2.Definition] = {}
        self.refused: set[bytes] = set()
        self.kinds_defined: list[int] = []
        self.heartbeats: list[tuple[int, ingest_pb2.Progress]] = []
        self.goodbyes: list[ingest_pb2.Goodbye] = []
        self.streams = 0

    async def Report(self, request_iterator: Any, context: Any) -> AsyncIterator[ingest_pb2.ReportResponse]:  # noqa: N802
        self.streams += 1
        stream, seen = self.streams, self.cursor
        async for message in request_iterator:
            answer = self.interfere(stream, message)
            if isinstance(answer, grpc.StatusCode):
                await context.abort(answer, "the test says so")
            elif isinstance(answer, ingest_pb2.ReportResponse):
                yield answer
            elif answer is None:
                seen = max([seen, *(frame.number for frame in message.frames.frames)])
                for response in self._follow(message, seen):
                    yield response

    def _follow(self, message: ingest_pb2.ReportRequest, seen: int) -> list[ingest_pb2.ReportResponse]:
        kind = message.WhichOneof("message")
        if kind == "hello":
            return [welcome(self.cursor, self.max_message_bytes)]
        if kind == "definitions":
            self._define(message.definitions)
        elif kind == "heartbeat":
            self.heartbeats.append((self.cursor, message.heartbeat.progress))
        elif kind == "goodbye" and seen <= self.cursor:
            self.goodbyes.append(message.goodbye)
            return [ack(self.cursor, goodbye=True)]
        elif kind == "frames":
            return self._take(message.frames)
        return []

    def _take(self, batch: ingest_pb2.FrameBatch) -> list[ingest_pb2.ReportResponse]:
        if batch.frames[0].number > self.cursor + 1:
            return []
        for frame in batch.frames:
            if frame.number != self.cursor + 1:
                continue
            keys = [frame.range.pattern_hash, frame.range.shapes_hash, frame.range.lines_hash]
            missing = [key for key in keys if key and key not in self.bodies]
            if missing and not self.refused.intersection(missing):
                return [ack(self.cursor), ingest_pb2.ReportResponse(want=ingest_pb2.Want(hashes=missing))]
            self.cursor += 1
            if missing or frame.WhichOneof("content") is None:
                self.rejected.append(frame.number)
            else:
                self.frames.append(frame)
        return [ack(self.cursor)]

    def _define(self, batch: ingest_pb2.DefinitionBatch) -> None:
        for body in batch.definitions:
            self.kinds_defined.append(body.kind)
            if hashlib.blake2b(bytes([body.kind]) + body.content, digest_size=16).digest() == body.hash:
                self.bodies[body.hash] = body
            else:
                self.refused.add(body.hash)


def welcome(number: int, max_message_bytes: int = 8 * 1024 * 1024) -> ingest_pb2.ReportResponse:
    message = ingest_pb2.Welcome(acked_frame=number, max_message_bytes=max_message_bytes)
    return ingest_pb2.ReportResponse(welcome=message)


def ack(number: int, *, goodbye: bool = False) -> ingest_pb2.ReportResponse:
    return ingest_pb2.ReportResponse(ack=ingest_pb2.Ack(acked_frame=number, goodbye=goodbye))


def back_off(wait_ms: int) -> ingest_pb2.ReportResponse:
    return ingest_pb2.ReportResponse(back_off=ingest_pb2.BackOff(wait_ms=wait_ms, reason="database is away"))


@asynccontextmanager
async def serving(service: SmallService, port: int = 0) -> AsyncIterator[str]:
    """Serve on loopback; gives the endpoint."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 16 * 1024 * 1024)])
    add: Any = ingest_pb2_grpc.add_IngestServiceServicer_to_server
    add(service, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(0)


async def until(look: Callable[[], bool]) -> None:
    """Returns once it is true. The caller has the deadline."""
    while not look():  # noqa: ASYNC110  what is looked at stands in files and in a server's state
        await asyncio.sleep(0.005)


def delivery(
    folder: Path,
    endpoint: str,
    *,
    ended: Callable[[], bool] = lambda: True,
    waits: Waits = SPEEDY,
    limits: Limits | None = None,
) -> Delivery:
    return Delivery(SpoolReader(folder), endpoint, ended=ended, waits=waits, limits=limits)
