"""The composition root: one asyncio process that serves agents over gRPC and people over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass

import uvicorn

from commwatch.service import verdicts
from commwatch.service.evaluations import Evaluations
from commwatch.service.ingest.repeats import Repeats
from commwatch.service.ingest.server import IngestServer, Limits
from commwatch.service.ingest.writer import Writer
from commwatch.service.listening import Address, bind, port_error
from commwatch.service.settings import Settings
from commwatch.service.store.contract import Store, StoreError
from commwatch.service.web import create_app

READERS = 8
"""Threads that read the store for streams."""
GRACE_S = 2.0
"""How long open streams and requests may go on after the signal to end."""
RESUMED_RUNS = 200
"""Runs that are evaluated at start, newest first: the last service may have died before it did."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """Where the service listens."""

    http_url: str
    grpc_address: str


class _HttpServer(uvicorn.Server):
    """Leaves signals to this process, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take no signal."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.listening.set()


async def serve(store: Store, settings: Settings, *, ready: Callable[[Ready], None], stop: asyncio.Event) -> None:
    """Serve until ``stop`` is set, then write what was taken and return. The caller closes the store.

    ``ready`` is called once both servers listen. Raises PortError when an address cannot be listened on.
    """
    evaluations = Evaluations(
        lambda run_id: verdicts.evaluate(store, run_id, time.time_ns()),
        every_s=settings.evaluate_every_s,
        clock=time.monotonic,
    )
    async with AsyncExitStack() as stack:
        http_address, grpc_address = Address.parse(settings.http_listen), Address.parse(settings.grpc_listen)
        http_socket = stack.enter_context(bind(http_address, "--http-listen"))
        readers = stack.enter_context(ThreadPoolExecutor(READERS, "commwatch-reader"))
        writer = Writer(store, queue_limit=settings.max_waiting_writes, clock=time.time_ns, listener=evaluations)
        stack.push_async_callback(writer.close)
        ingest = IngestServer(store, writer, readers, _limits(settings))
        try:
            grpc_port = await ingest.start(str(grpc_address))
        except OSError:
            raise port_error(grpc_address, "the address is in use or not this machine's", "--grpc-listen") from None
        stack.push_async_callback(ingest.stop, GRACE_S)
        _background(stack, evaluations.run())
        _background(stack, _sweep(store, writer, evaluations, settings.lost_after_s))
        _background(stack, _resume(store, evaluations))
        http = _HttpServer(
            uvicorn.Config(create_app(store), log_config=None, access_log=False, timeout_graceful_shutdown=int(GRACE_S))
        )
        serving = asyncio.create_task(http.serve(sockets=[http_socket]))
        stack.push_async_callback(_end_http, http, serving)
        await _first(http.listening, serving)
        http_url = f"http://{Address(http_address.host, http_socket.getsockname()[1])}"
        ready(Ready(http_url, str(Address(grpc_address.host, grpc_port))))
        await _first(stop, serving)


async def _first(event: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Wait for the event, or raise when the HTTP server ends before it."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if serving.done() and not event.is_set():
        serving.result()
        raise RuntimeError("the HTTP server ended by itself")


async def _end_http(http: _HttpServer, serving: asyncio.Task[None]) -> None:
    http.should_exit = True
    await asyncio.wait([serving])


def _background(stack: AsyncExitStack, work: Coroutine[object, None, None]) -> None:
    task = asyncio.create_task(work)
    stack.push_async_callback(_cancel, task)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def _sweep(store: Store, writer: Writer, evaluations: Evaluations, lost_after_s: float) -> None:
    """Mark silent ranks lost. Silence counts only while the service could hear and store what ranks say."""
    failures = Repeats(log)
    started = time.monotonic()
    while True:
        await asyncio.sleep(min(1.0, lost_after_s / 4))
        if time.monotonic() - max(started, writer.unavailable_at or started) < lost_after_s:
            continue
        now = time.time_ns()
        try:
            lost = await asyncio.to_thread(store.mark_lost, now - int(lost_after_s * 1e9), now)
        except StoreError as error:
            failures.warning("marking lost ranks failed", error)
            continue
        for key in lost:
            log.info("rank lost run=%s attempt=%d rank=%d", key.run_id, key.attempt, key.rank)
            evaluations.run_changed(key.run_id)


async def _resume(store: Store, evaluations: Evaluations) -> None:
    """Evaluate the newest runs again: doing it twice changes nothing."""
    try:
        runs = await asyncio.to_thread(lambda: store.runs(limit=RESUMED_RUNS))
    except StoreError as error:
        Repeats(log).warning("reading runs at start failed", error)
        return
    for run in reversed(runs):
        evaluations.run_changed(run.id)


def _limits(settings: Settings) -> Limits:
    return Limits(
        max_message_bytes=settings.max_message_bytes,
        max_streams=settings.max_streams,
        known_definitions=settings.known_definitions,
        back_off_ms=settings.back_off_ms,
        silence_s=settings.stream_silence_s,
    )
