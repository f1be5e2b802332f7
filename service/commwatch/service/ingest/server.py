"""The gRPC server of ``IngestService``: hellos, takeovers, limits and health."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from commwatch.service.domain.records import Hello, RankKey
from commwatch.service.ingest import wire
from commwatch.service.ingest.checks import MalformedError
from commwatch.service.ingest.known import KnownDefinitions
from commwatch.service.ingest.repeats import Repeats
from commwatch.service.ingest.requests import CaptureRequests
from commwatch.service.ingest.session import Session
from commwatch.service.ingest.writer import QueueFullError, Writer
from commwatch.service.store.contract import Store, StoreUnavailableError
from commwatch.v1 import ingest_pb2

SERVICE = "commwatch.v1.IngestService"
HELLO_TIMEOUT_S = 20.0

log = logging.getLogger(__name__)

_Context = aio.ServicerContext[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one stream may do. Sizes in bytes, times as the names say."""

    max_message_bytes: int = 8 * 1024 * 1024
    max_streams: int = 8_192
    known_definitions: int = 100_000
    back_off_ms: int = 1_000
    silence_s: float = 120.0
    requests_every_s: float = 1.0


class _EndError(Exception):
    """Ends a stream with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class IngestServicer:
    """Serves ``Report``. Messages are taken as bytes, so that an undecodable one ends its stream with a sentence."""

    def __init__(self, store: Store, writer: Writer, readers: Executor, limits: Limits) -> None:
        self._store = store
        self._writer = writer
        self._readers = readers
        self._limits = limits
        self.requests = CaptureRequests(store, readers, every_s=limits.requests_every_s)
        """Must run while the server serves."""
        self._known = KnownDefinitions(store, readers, limits.known_definitions)
        self._streams: dict[RankKey, asyncio.Task[None]] = {}
        self._taken_over: set[asyncio.Task[None]] = set()
        self._failures = Repeats(log)

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server registers."""
        report: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self.report)
        return grpc.method_handlers_generic_handler(SERVICE, {"Report": report})

    async def report(self, _requests: object, context: _Context) -> None:
        """One stream. It runs in a task of its own, which a newer stream of the same rank can end."""
        task = asyncio.ensure_future(self._serve(context))
        try:
            await task
        except asyncio.CancelledError:
            if task not in self._taken_over:
                raise
            await context.abort(grpc.StatusCode.ABORTED, "a newer stream of this rank took over")
        except _EndError as end:
            await context.abort(end.code, end.details)
        except aio.BaseError:
            return  # The transport ended under the stream: the client or this server is gone.
        except Exception as error:  # noqa: BLE001  # the edge of the process: one stream's failure must not be another's
            self._failures.warning("stream failed", error)
            await context.abort(grpc.StatusCode.INTERNAL, "the service failed to store this; its log says why")
        finally:
            self._taken_over.discard(task)

    async def _serve(self, context: _Context) -> None:
        hello = await self._read_hello(context)
        task = asyncio.current_task()
        assert task is not None
        while (older := self._streams.get(hello.key)) is not None:
            self._taken_over.add(older)
            older.cancel()
            await asyncio.wait([older])
        self._streams[hello.key] = task
        try:
            await self._run(hello, context)
        finally:
            del self._streams[hello.key]

    async def _run(self, hello: Hello, context: _Context) -> None:
        writing = asyncio.Lock()

        async def send(response: ingest_pb2.ReportResponse) -> None:
            # Two tasks send on one stream, and gRPC takes one message at a time.
            async with writing:
                await context.write(response.SerializeToString())

        limits = self._limits
        cursor = await self._open(hello)
        welcome = ingest_pb2.Welcome(acked_frame=cursor, max_message_bytes=limits.max_message_bytes)
        await send(ingest_pb2.ReportResponse(welcome=welcome))
        session = Session(
            hello,
            cursor,
            writer=self._writer,
            known=self._known,
            stored_parts=self._stored_parts,
            max_frame_bytes=limits.max_message_bytes,
            back_off_ms=limits.back_off_ms,
            send=send,
        )
        with self.requests.to(hello.key, send):
            try:
                while (message := await self._read(context, limits.silence_s)) is not None:
                    await session.take(message)
            except MalformedError as error:
                raise _EndError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    async def _stored_parts(self, key: RankKey) -> dict[int, dict[int, int]]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self._store.stored_parts, key)

    async def _open(self, hello: Hello) -> int:
        try:
            return await self._writer.open_stream(hello)
        except (QueueFullError, StoreUnavailableError) as error:
            raise _EndError(grpc.StatusCode.UNAVAILABLE, f"{error} Nothing is lost: connect again later.") from None
        except ValueError as error:
            raise _EndError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    async def _read_hello(self, context: _Context) -> Hello:
        message = await self._read(context, HELLO_TIMEOUT_S)
        if message is None or message.WhichOneof("message") != "hello":
            raise _EndError(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a stream is not a hello")
        try:
            return wire.read_hello(message.hello)
        except MalformedError as error:
            raise _EndError(grpc.StatusCode.INVALID_ARGUMENT, f"hello: {error}") from None

    async def _read(self, context: _Context, timeout_s: float) -> ingest_pb2.ReportRequest | None:
        """The next message; None at the end of the stream."""
        try:
            content = await asyncio.wait_for(context.read(), timeout_s)
        except asyncio.TimeoutError:
            raise _EndError(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was sent for {timeout_s:g} s") from None
        if not isinstance(content, bytes):
            return None  # aio.EOF
        try:
            return ingest_pb2.ReportRequest.FromString(content)
        except DecodeError:
            raise _EndError(grpc.StatusCode.INVALID_ARGUMENT, "a message cannot be decoded") from None


class IngestServer:
    """A gRPC server with ``IngestService`` and ``grpc.health.v1``. Made on its event loop."""

    def __init__(self, store: Store, writer: Writer, readers: Executor, limits: Limits) -> None:
        self._health = health.aio.HealthServicer()
        self._server = aio.server(
            options=[
                # A message over the limit of frames is refused frame by frame; one over this ends its stream.
                ("grpc.max_receive_message_length", 2 * limits.max_message_bytes),
                # Two servers on one port would each take some of the streams.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ],
            maximum_concurrent_rpcs=limits.max_streams,
        )
        servicer = IngestServicer(store, writer, readers, limits)
        self._requests = servicer.requests
        self._passing_on: asyncio.Task[None] | None = None
        self._server.add_generic_rpc_handlers((servicer.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, listen: str) -> int:
        """Listen on ``host:port``; port 0 takes a free one. Returns the port. Raises OSError when it is in use."""
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: {error}") from None
        if port == 0:
            raise OSError(f"cannot listen on {listen}")
        await self._server.start()
        self._passing_on = asyncio.create_task(self._requests.run())
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return port

    async def stop(self, grace_s: float) -> None:
        """Take no new stream, end the open ones after the grace."""
        await self._health.enter_graceful_shutdown()
        if self._passing_on is not None:
            self._passing_on.cancel()
            await asyncio.wait([self._passing_on])
        await self._server.stop(grace_s)
