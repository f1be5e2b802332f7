"""Logging of what may fail thousands of times a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 10.0
_MAX_KINDS = 256


class Repeats:
    """Logs each kind of failure at most once every ``INTERVAL_S`` seconds, with the number of those left out."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def warning(self, event: str, error: BaseException) -> None:
        """Log an error with its traceback."""
        kind = (event, type(error).__name__)
        logged_at, left_out = self._kinds.get(kind, (None, 0))
        now = self._clock()
        if logged_at is not None and now - logged_at < INTERVAL_S:
            self._kinds[kind] = (logged_at, left_out + 1)
            return
        if len(self._kinds) >= _MAX_KINDS:
            self._kinds.clear()
        self._kinds[kind] = (now, 0)
        self._log.warning("%s error=%r repeated=%d", event, str(error), left_out, exc_info=error)
