"""The gRPC part of the service in this process, on loopback, over a real SQLite file."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from commwatch.service.ingest.server import IngestServer, Limits
from commwatch.service.ingest.writer import Writer
from commwatch.service.store.contract import Store
from commwatch.service.store.opening import open_store
from commwatch.v1 import ingest_pb2
from tests.contract.wire_samples import L, M, P, S

ALL = ingest_pb2.DefinitionBatch(definitions=[P, S, L, M])


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.progressed: list[str] = []

    def run_changed(self, run_id: str) -> None:
        self.changed.append(run_id)

    def run_progressed(self, run_id: str) -> None:
        self.progressed.append(run_id)


@dataclasses.dataclass
class Service:
    port: int
    store: Store
    heard: Heard
    writer: Writer


@asynccontextmanager
async def serving(path: Path, *, queue_limit: int = 64, limits: Limits | None = None) -> AsyncIterator[Service]:
    store = open_store(f"sqlite:///{path / 'commwatch.db'}", migrate=True)
    heard = Heard()
    writer = Writer(store, queue_limit=queue_limit, clock=lambda: 1_800_000_000_000_000_000, listener=heard)
    with ThreadPoolExecutor(2) as readers:
        server = IngestServer(store, writer, readers, limits or Limits())
        port = await server.start("127.0.0.1:0")
        try:
            yield Service(port, store, heard, writer)
        finally:
            await server.stop(0)
            await writer.close()
    store.close()


def run(path: Path, body: Callable[[Service], Awaitable[None]], limits: Limits | None = None) -> None:
    """Serve while the body runs."""

    async def main() -> None:
        async with serving(path, limits=limits) as service:
            await body(service)

    asyncio.run(main())


def ack(number: int, *, goodbye: bool = False) -> ingest_pb2.Ack:
    return ingest_pb2.Ack(acked_frame=number, goodbye=goodbye)


def want(*definitions: ingest_pb2.Definition) -> ingest_pb2.Want:
    return ingest_pb2.Want(hashes=[item.hash for item in definitions])
