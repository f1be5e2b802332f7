"""A rank's counters in a small file that the rank maps and its forwarder reads.

One writer, any number of readers. There are two slots; the lowest bit of the sequence number says which is valid. A
write fills the other slot and then moves the sequence on: a reader at any moment, and SIGKILL at any moment, find a
whole slot.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path

MAGIC = 0x434F4D4D57503032
TEXT_BYTES = 200
_HEADER = struct.Struct("=QQ")  # magic, sequence
_SEQUENCE_WORD = 1
_COUNTERS = struct.Struct("=QQQQQQQ")
_ENDING = struct.Struct(f"=B{TEXT_BYTES}s{TEXT_BYTES}s")
_SLOT_BYTES = -(-(_COUNTERS.size + _ENDING.size) // 8) * 8
_SLOTS_AT = (_HEADER.size, _HEADER.size + _SLOT_BYTES)
SIZE = _SLOTS_AT[1] + _SLOT_BYTES

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
        # Assigning a word stores it at once; pack_into fills its place with zeros first, which a reader can see.
        self._words = memoryview(self._memory).cast("Q")
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
        sequence = self._sequence + 1
        at = _SLOTS_AT[sequence & 1]
        _COUNTERS.pack_into(
            self._memory, at, range_number, last_step, range_steps, steps, calls, dropped_calls, dropped_steps
        )
        self._words[_SEQUENCE_WORD] = self._sequence = sequence

    def end(self, ending: int, detail: str, reason: str) -> None:
        """Write how the rank ended, or why something was dropped."""
        valid = _SLOTS_AT[self._sequence & 1]
        slot = self._memory[valid : valid + _COUNTERS.size] + _ENDING.pack(ending, _clip(detail), _clip(reason))
        for _ in _SLOTS_AT:  # both: from now on the counters alone are written
            sequence = self._sequence + 1
            at = _SLOTS_AT[sequence & 1]
            self._memory[at : at + len(slot)] = slot
            self._words[_SEQUENCE_WORD] = self._sequence = sequence


def read_page(path: Path) -> Counters:
    """The counters as they stand. Raises OSError or PageError."""
    for _ in range(_RETRIES):
        content = path.read_bytes()
        sequence = _sequence(path, content)
        # The valid slot is written again only after the sequence moved on.
        if _sequence(path, path.read_bytes()) == sequence:
            break
    else:
        raise PageError(f"{path} changes faster than it can be read")
    at = _SLOTS_AT[sequence & 1]
    ending, detail, reason = _ENDING.unpack_from(content, at + _COUNTERS.size)
    numbers = Counters(*_COUNTERS.unpack_from(content, at))
    return replace(numbers, ending=ending, detail=_text(detail), reason=_text(reason))


def _sequence(path: Path, content: bytes) -> int:
    if len(content) != SIZE:
        raise PageError(f"{path} is no page: {len(content)} bytes instead of {SIZE}")
    magic, sequence = _HEADER.unpack_from(content, 0)
    if magic != MAGIC:
        raise PageError(f"{path} is no page of this version")
    return int(sequence)


def _clip(text: str) -> bytes:
    return text.encode(errors="replace")[:TEXT_BYTES].decode(errors="ignore").encode()


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")
