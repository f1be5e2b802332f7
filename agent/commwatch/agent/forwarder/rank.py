"""Tells whether a rank's process still runs."""

from __future__ import annotations

import os
from pathlib import Path


def start_ticks(pid: int) -> str | None:
    """When a process started, in clock ticks since boot, as the kernel prints it; None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name stands in parentheses and may hold anything; what follows it has fixed places.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else fields[19]


class RankProcess:
    """A process by id and start time: an id that was given to another process is not taken for it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._started = start_ticks(pid)
        self._proc = Path("/proc/self/stat").exists()

    def ended(self) -> bool:
        """Whether it is gone."""
        if not self._proc:
            return not _signalable(self._pid)
        return self._started is None or start_ticks(self._pid) != self._started


def _signalable(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
