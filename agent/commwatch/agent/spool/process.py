"""Which process a rank is, so that whoever reads its spool later can tell whether that very process still runs."""

from __future__ import annotations

import os
from pathlib import Path

from commwatch.agent.spool import names


def keep_process(folder: Path, pid: int) -> None:
    """Write down which process the rank is: its id, when it started, and the boot of its machine. Raises OSError."""
    (folder / names.PROCESS).write_text(f"{pid} {_start_ticks(pid)} {_boot_id()}\n")


class RankProcess:
    """The process of the rank that wrote ``folder``; ``pid`` is its id as its hello names it.

    An id alone may be given to another process later: start time and boot must be those that were kept. Where nothing
    was kept, the process that has the id now is taken for it.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self._pid = pid
        self._started, self._boot = _kept(folder, pid) or (_start_ticks(pid), _boot_id())
        self._proc = Path("/proc/self/stat").exists()

    def ended(self) -> bool:
        """Whether it is gone from this machine."""
        if not self._proc:
            return not _signalable(self._pid)
        return self._started == 0 or self._boot != _boot_id() or _start_ticks(self._pid) != self._started


def _kept(folder: Path, pid: int) -> tuple[int, str] | None:
    try:
        kept, ticks, boot = (folder / names.PROCESS).read_text().split()
    except (OSError, ValueError):
        return None
    return (int(ticks), boot) if kept == str(pid) and ticks.isdecimal() else None


def _start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 when it is gone, a zombie, or the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    # The name stands in parentheses and may hold anything; what follows it has fixed places.
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in {"Z", "X"} else int(fields[19])


def _boot_id() -> str:
    """Identity of the running kernel since its boot; ``-`` where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or "-"
    except OSError:
        return "-"


def _signalable(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
