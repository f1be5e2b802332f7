"""An agent's end of a stream, driven message by message."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from google.protobuf.message import Message
from grpc import aio

from commwatch.v1 import ingest_pb2
from tests.contract.wire_samples import hello as make_hello

DEADLINE_S = 20.0
METHOD = "/commwatch.v1.IngestService/Report"


class Agent:
    """``async with Agent(port) as agent``: one stream. Every wait has a deadline."""

    def __init__(self, port: int) -> None:
        self._channel = aio.insecure_channel(f"127.0.0.1:{port}")
        report: Any = self._channel.stream_stream(METHOD, response_deserializer=ingest_pb2.ReportResponse.FromString)
        self.call: Any = report()

    async def __aenter__(self) -> Agent:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.call.cancel()
        await self._channel.close()

    async def send(self, **message: Any) -> None:
        await self.send_bytes(ingest_pb2.ReportRequest(**message).SerializeToString())

    async def send_bytes(self, content: bytes) -> None:
        await asyncio.wait_for(self.call.write(content), DEADLINE_S)

    async def receive(self) -> Message:
        """The next response's content."""
        response = await asyncio.wait_for(self.call.read(), DEADLINE_S)
        if response is aio.EOF:
            raise EOFError(await self.status())
        found: Message = getattr(response, response.WhichOneof("message"))
        return found

    async def status(self) -> tuple[str, str]:
        """(code, details) of the ended stream."""
        code = await asyncio.wait_for(self.call.code(), DEADLINE_S)
        return code.name, await self.call.details()

    async def hello(self, *args: int, **fields: Any) -> int:
        """Say hello; the frame to go on after."""
        await self.send(hello=make_hello(*args, **fields))
        welcome = await self.receive()
        assert isinstance(welcome, ingest_pb2.Welcome)
        return welcome.acked_frame

    async def end(self) -> tuple[str, str]:
        """Half-close and wait for the status."""
        await self.call.done_writing()
        return await self.status()
