"""A rank's counters in a small file that the rank maps and its forwarder reads.

The file outlives SIGKILL of the rank. One writer; readers retry while a write is under way (a sequence lock: the
sequence is odd meanwhile).
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path

MAGIC = 0x434F4D4D57503031
TEXT_BYTES = 200
_HEADER = struct.Struct("<QQ")
_COUNTERS = struct.Struct("<QQQQQQQ")
_ENDING = struct.Struct(f"<B{TEXT_BYTES}s{TEXT_BYTES}s")
_COUNTERS_AT = _HEADER.size
_ENDING_AT = _COUNTERS_AT + _COUNTERS.size
SIZE = _ENDING_AT + _ENDING.size

RUNNING, CLEAN, EXCEPTION = 0, 1, 2
_RETRIES = 1000


class PageError(ValueError):
    """The file is no page of this version."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What the rank knows of itself. ``ending`` is RUNNING, CLEAN or EXCEPTION."""

    range_number: int = 0
    last_step: int = 0
    range_steps: int = 0
    steps: int = 0
    calls: int = 0
    dropped_calls: int = 0
    dropped_steps: int = 0
    ending: int = RUNNING
    detail: str = ""
    reason: str = ""


class PageWriter:
    """Creates the file, which must not exist. Raises OSError."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)  # a full disk shows here, not as SIGBUS at a later write
            self._memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._sequence = 0
        _HEADER.pack_into(self._memory, 0, MAGIC, 0)

    def publish(
        self,
        range_number: int,
        last_step: int,
        range_steps: int,
        steps: int,
        calls: int,
        dropped_calls: int,
        dropped_steps: int,
    ) -> None:
        """Write the counters: about a microsecond."""
        memory, sequence = self._memory, self._sequence
        _HEADER.pack_into(memory, 0, MAGIC, sequence + 1)
        _COUNTERS.pack_into(
            memory, _COUNTERS_AT, range_number, last_step, range_steps, steps, calls, dropped_calls, dropped_steps
        )
        _HEADER.pack_into(memory, 0, MAGIC, sequence + 2)
        self._sequence = sequence + 2

    def end(self, ending: int, detail: str, reason: str) -> None:
        """Write how the rank ended, or why something was dropped."""
        _HEADER.pack_into(self._memory, 0, MAGIC, self._sequence + 1)
        _ENDING.pack_into(self._memory, _ENDING_AT, ending, _clip(detail), _clip(reason))
        self._sequence += 2
        _HEADER.pack_into(self._memory, 0, MAGIC, self._sequence)


def read_page(path: Path) -> Counters:
    """The counters as they stand. Raises OSError or PageError."""
    content = b""
    for _ in range(_RETRIES):
        content = path.read_bytes()
        if len(content) != SIZE:
            raise PageError(f"{path} is no page: {len(content)} bytes instead of {SIZE}")
        magic, before = _HEADER.unpack_from(content, 0)
        if magic != MAGIC:
            raise PageError(f"{path} is no page of this version")
        after = _HEADER.unpack_from(path.read_bytes(), 0)[1]
        if before == after and before % 2 == 0:
            break
    # A rank that was killed in the middle of a write leaves the sequence odd for ever; its words are written whole.
    counters = _COUNTERS.unpack_from(content, _COUNTERS_AT)
    ending, detail, reason = _ENDING.unpack_from(content, _ENDING_AT)
    numbers = Counters(*counters)
    return replace(numbers, ending=ending, detail=_text(detail), reason=_text(reason))


def _clip(text: str) -> bytes:
    return text.encode()[:TEXT_BYTES].decode(errors="ignore").encode()


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")
