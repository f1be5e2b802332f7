"""Sends one rank's spool over one stream after another, until everything and its goodbye are acknowledged."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from commwatch.agent.forwarder.stream import Limits, RankStream, StreamBrokenError, UndeliverableError
from commwatch.agent.spool.reader import SpoolReader
from commwatch.v1 import ingest_pb2_grpc

POLL_S = 0.1
CLOSING_LIMIT_S = 1.0

_log = logging.getLogger("commwatch.forwarder")

_OPTIONS = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),  # the service is asked directly
    ("grpc.use_local_subchannel_pool", 1),  # each dial is a new one, without the back-off of the dial before
]


class DeadlineError(Exception):
    """The rank ended and the service did not acknowledge everything in time. The spool is left."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds. ``deadline`` counts from the rank's end. ``dial`` is the longest jitter before a dial.

    ``renewed``: each acknowledgement begins the deadline anew, for whoever waits as long as it goes on.
    """

    deadline: float
    heartbeat: float
    dial: float
    first: float = 0.1
    longest: float = 5.0
    renewed: bool = False


class Delivery:
    """``ended`` tells whether the rank is gone."""

    def __init__(
        self,
        reader: SpoolReader,
        endpoint: str,
        *,
        ended: Callable[[], bool],
        waits: Waits,
        limits: Limits | None = None,
    ) -> None:
        self._reader = reader
        self._endpoint = endpoint
        self._ended = ended
        self._waits = waits
        self._limits = limits or Limits()
        self._deadline_s = waits.deadline
        self._gone_at: float | None = None
        self._wait_s = waits.first

    def hasten(self, deadline_s: float) -> None:
        """Somebody wants this process to end: at most so many seconds after the rank ended."""
        self._deadline_s = min(self._deadline_s, deadline_s)

    async def run(self) -> None:
        """Returns when all is acknowledged. Raises DeadlineError, UndeliverableError, SpoolError or OSError.

        Whatever the delivery waits for, the deadline is kept: it is watched from beside.
        """
        delivering = asyncio.ensure_future(self._deliver())
        try:
            while True:
                done, _ = await asyncio.wait({delivering}, timeout=POLL_S)
                if done:
                    return delivering.result()
                if self._rank_is_gone() and self._gone_for() > self._deadline_s:
                    raise DeadlineError(f"{self._endpoint} did not take everything within {self._deadline_s:g} s")
        finally:
            delivering.cancel()
            await asyncio.wait({delivering}, timeout=CLOSING_LIMIT_S)

    async def _deliver(self) -> None:
        await asyncio.sleep(random.uniform(0, self._waits.dial))  # noqa: S311  jitter, not a secret
        while not await self._attempt():
            # When a service comes back, many ranks dial: they spread as at the beginning.
            await asyncio.sleep(random.uniform(0, max(self._wait_s, self._waits.dial)))  # noqa: S311  jitter
            self._wait_s = min(2 * self._wait_s, self._waits.longest)

    async def _attempt(self) -> bool:
        """One connection. True when everything is acknowledged."""
        async with grpc.aio.insecure_channel(self._endpoint, options=_OPTIONS) as channel:
            stub: Any = ingest_pb2_grpc.IngestServiceStub(channel)  # its types are those of the blocking client
            call = stub.Report()
            stream = RankStream(
                self._reader,
                call,
                ended=self._rank_is_gone,
                progressed=self._progressed,
                heartbeat_s=self._waits.heartbeat,
                limits=self._limits,
            )
            try:
                await stream.run()
            except StreamBrokenError as error:
                _log.info("stream to %s broke: %s", self._endpoint, error)
                return False
            except UndeliverableError as error:
                raise UndeliverableError(f"{self._endpoint}: {error}") from None
            finally:
                call.cancel()
        return True

    def _progressed(self) -> None:
        self._wait_s = self._waits.first
        if self._waits.renewed and self._gone_at is not None:
            self._gone_at = time.monotonic()

    def _rank_is_gone(self) -> bool:
        if self._gone_at is None and self._ended():
            self._gone_at = time.monotonic()
        return self._gone_at is not None

    def _gone_for(self) -> float:
        assert self._gone_at is not None
        return time.monotonic() - self._gone_at
