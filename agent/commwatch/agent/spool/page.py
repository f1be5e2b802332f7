"""A rank's counters in a small file that the rank maps and its forwarder reads, and one word the other way.

The file outlives SIGKILL of the rank. One writer and a ring of slots: the sequence says which slot counts, and the
writer fills the next before it moves the sequence on. So the slot that counts is whole, also when the writer was killed
in the middle of the next, and a reader only has to see that the writer did not come round to it meanwhile.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

MAGIC = 0x434F4D4D57503034
TEXT_BYTES = 200
_HEADER = struct.Struct("=QQQ")
_REQUEST_AT = 16
_STEPS_BITS = 16
_SLOT = struct.Struct(f"=QQQQQQQQQQQQQB{TEXT_BYTES}s{TEXT_BYTES}s")
SLOTS = 16
SIZE = _HEADER.size + SLOTS * _SLOT.size

RUNNING, CLEAN, EXCEPTION = 0, 1, 2
_RETRIES = 1000


class PageError(ValueError):
    """The file is no page of this version, or its writer never held still."""


class Numbers(NamedTuple):
    """What a rank counts: the open range, then the whole rank. Their order is that of the file.

    The names are those of the wire's Progress, except ``request``: the newest capture request the rank took up.
    """

    range_number: int = 0
    last_step: int = 0
    range_steps: int = 0
    steps: int = 0
    calls: int = 0
    dropped_calls: int = 0
    dropped_steps: int = 0
    expected_calls: int = 0
    unverified_calls: int = 0
    unattributed_calls: int = 0
    recording_ns: int = 0
    elapsed_ns: int = 0
    request: int = 0


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
    expected_calls: int = 0
    unverified_calls: int = 0
    unattributed_calls: int = 0
    recording_ns: int = 0
    elapsed_ns: int = 0
    request: int = 0
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
        self._counters = Numbers()
        self._ending: tuple[int, bytes, bytes] = (RUNNING, b"", b"")
        # Whole words: SIGKILL cannot cut the store of one in two.
        self._words = memoryview(self._memory)[: _HEADER.size].cast("Q")
        self._words[0] = MAGIC

    def publish(self, numbers: Numbers) -> None:
        """Write the counters: about a microsecond."""
        self._counters = numbers
        self._write()

    def requested(self) -> tuple[int, int]:
        """(number, steps) of the newest capture request, (0, 0) before the first: a memory read."""
        word = self._words[2]
        return word >> _STEPS_BITS, word & ((1 << _STEPS_BITS) - 1)

    def end(self, ending: int, detail: str, reason: str) -> None:
        """Write how the rank ended, or why something was dropped."""
        self._ending = (ending, _clip(detail), _clip(reason))
        self._write()

    def _write(self) -> None:
        following = self._words[1] + 1
        _SLOT.pack_into(self._memory, _slot_at(following), *self._counters, *self._ending)
        self._words[1] = following


def read_page(path: Path) -> Counters:
    """The counters as they stand. Raises OSError or PageError."""
    with path.open("rb", buffering=0) as file:
        for _ in range(_RETRIES):
            content = os.pread(file.fileno(), SIZE + 1, 0)
            if len(content) != SIZE:
                raise PageError(f"{path} is no page: {len(content)} bytes instead of {SIZE}")
            magic, before, _ = _HEADER.unpack_from(content, 0)
            if magic != MAGIC:
                raise PageError(f"{path} is no page of this version")
            after = _HEADER.unpack(os.pread(file.fileno(), _HEADER.size, 0))[1]
            if after - before < SLOTS - 1:
                *numbers, ending, detail, reason = _SLOT.unpack_from(content, _slot_at(before))
                return replace(Counters(*numbers), ending=ending, detail=_text(detail), reason=_text(reason))
    raise PageError(f"{path} changed during each of {_RETRIES} reads")


def request_capture(path: Path, number: int, steps: int) -> None:
    """Ask the rank of this page, which looks between two steps. Replaces a request it has not taken up yet.

    Raises OSError. ``number`` counts from 1, below 2**48; ``steps`` is below 2**16.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, struct.pack("=Q", number << _STEPS_BITS | steps), _REQUEST_AT)
    finally:
        os.close(descriptor)


def _slot_at(sequence: int) -> int:
    return _HEADER.size + sequence % SLOTS * _SLOT.size


def _clip(text: str) -> bytes:
    return text.encode(errors="replace")[:TEXT_BYTES].decode(errors="ignore").encode()


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")
