"""Capture requests on their way to the rank, one at a time: the page has room for one."""

from __future__ import annotations

import logging
from collections import OrderedDict

from commwatch.agent.spool.page import Counters
from commwatch.agent.spool.reader import SpoolReader
from commwatch.v1 import ingest_pb2

MAX_WAITING = 16
"""Requests kept; further ones are ignored, and come again with the next stream."""

MAX_STEPS = 1_000
_MOST = 1 << 48

_log = logging.getLogger("commwatch.forwarder")


class Requests:
    """Requests by number. One that the rank took up, or that waits already, is not taken again."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, int] = OrderedDict()
        self._passed_on = 0

    def take(self, request: ingest_pb2.CaptureRequest) -> None:
        """The service asks."""
        number, steps = request.number, request.steps
        if not 0 < number < _MOST or not 0 < steps <= MAX_STEPS:
            _log.warning("ignored a request to capture %d steps (number %d)", steps, number)
        elif number > self._passed_on and len(self._waiting) < MAX_WAITING:
            self._waiting.setdefault(number, steps)

    def pass_on(self, reader: SpoolReader, counters: Counters) -> None:
        """Hand the next one to the rank, once it took up the one before. Called at each heartbeat."""
        for number in [number for number in self._waiting if number <= counters.request]:
            del self._waiting[number]
        if not self._waiting or self._passed_on > counters.request:
            return
        number = min(self._waiting)
        try:
            reader.request_capture(number, self._waiting.pop(number))
        except OSError as error:
            _log.warning("request %d did not reach the rank: %s", number, error)
            return
        self._passed_on = number
