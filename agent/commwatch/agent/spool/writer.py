"""The rank's side of the spool: never waits, never raises into the job, counts what it drops.

Every append is one ``write`` to the kernel, so that SIGKILL of the rank loses nothing that was appended. A write that
went wrong in the middle (a full disk) is taken back, so that a torn message never stands before a whole one.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from commwatch.agent.spool import delimited, names, page
from commwatch.v1 import ingest_pb2, records_pb2

SEGMENT_BYTES = 1024 * 1024


class SpoolWriter:
    """Creates the folder. Raises OSError when it cannot; afterwards nothing raises."""

    def __init__(self, folder: Path, hello: ingest_pb2.Hello, max_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.dropped_frames = 0
        self.reason = ""
        self._max_bytes = max_bytes
        self._pid = os.getpid()
        self._defined: set[bytes] = set()
        self._frames = 0
        self._older_bytes = 0
        self._page = page.PageWriter(folder / names.PAGE)
        self._definitions = _AppendFile(folder / names.DEFINITIONS)
        self._segment = _AppendFile(names.segment(folder, 1))
        part = folder / f"{names.HELLO}.part"
        part.write_bytes(hello.SerializeToString())
        part.rename(folder / names.HELLO)

    def define(self, kind: int, content: bytes) -> bytes:
        """Keep a body once; returns its hash. Ranges that refer to a body that could not be kept are dropped too."""
        key = hashlib.blake2b(bytes([kind]) + content, digest_size=16).digest()
        if key not in self._defined and os.getpid() == self._pid:
            message = ingest_pb2.Definition(kind=ingest_pb2.DefinitionKind.ValueType(kind), hash=key, content=content)
            if self._room(len(content)) and self._definitions.append(message.SerializeToString(), self._note_error):
                self._defined.add(key)
        return key

    def append(self, content: records_pb2.StepRange | records_pb2.Facts) -> bool:
        """Keep one record under the next number. False when it was dropped: a dropped record takes no number."""
        if os.getpid() != self._pid:
            return False
        message = ingest_pb2.Frame(number=self._frames + 1)
        known = all(not key or key in self._defined for key in _references(content))
        if isinstance(content, records_pb2.StepRange):
            message.range.CopyFrom(content)
        else:
            message.facts.CopyFrom(content)
        serialized = message.SerializeToString()
        if self._segment.size >= SEGMENT_BYTES:
            self._rotate()
        if known and self._room(len(serialized)) and self._segment.append(serialized, self._note_error):
            self._frames += 1
            return True
        self.dropped_frames += 1
        return False

    def publish(
        self,
        *,
        range_number: int,
        last_step: int,
        range_steps: int,
        steps: int,
        calls: int,
        dropped_calls: int,
        dropped_steps: int,
    ) -> None:
        """Show the counters to the forwarder."""
        if os.getpid() == self._pid:
            self._page.publish(range_number, last_step, range_steps, steps, calls, dropped_calls, dropped_steps)

    def note(self, reason: str) -> None:
        """Say why something was dropped, in one sentence. The first reason stays."""
        if not self.reason and os.getpid() == self._pid:
            self.reason = reason
            self._page.end(page.RUNNING, "", reason)

    def close(self, ending: str, detail: str) -> None:
        """Say how the rank ended: ``clean`` or ``exception``. Nothing is written afterwards."""
        if os.getpid() == self._pid:
            self._page.end(page.CLEAN if ending == "clean" else page.EXCEPTION, detail, self.reason)
            self._segment.close()
            self._definitions.close()

    def _room(self, size: int) -> bool:
        used = self._older_bytes + self._segment.size + self._definitions.size + size
        if used <= self._max_bytes:
            return True
        self._count_older()  # the forwarder may have deleted what was acknowledged
        if self._older_bytes + self._segment.size + self._definitions.size + size <= self._max_bytes:
            return True
        self.note(f"the spool reached its limit of {self._max_bytes} bytes (COMMWATCH_SPOOL_MAX_BYTES)")
        return False

    def _rotate(self) -> None:
        try:
            following = _AppendFile(names.segment(self.folder, self._frames + 1))
        except OSError as error:
            self._note_error(error)
            return
        self._segment.close()
        self._segment = following
        self._count_older()

    def _count_older(self) -> None:
        total = 0
        for _, path in names.segments(self.folder):
            if path != self._segment.path:
                try:
                    total += path.stat().st_size
                except OSError:  # deleted a moment ago
                    continue
        self._older_bytes = total

    def _note_error(self, error: OSError) -> None:
        self.note(f"cannot write the spool: {error.strerror or error}")


def _references(content: records_pb2.StepRange | records_pb2.Facts) -> tuple[bytes, ...]:
    if isinstance(content, records_pb2.Facts):
        return (content.modules_hash,)
    return content.pattern_hash, content.shapes_hash, content.lines_hash


class _AppendFile:
    """A file that holds whole messages only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def append(self, message: bytes, on_error: Callable[[OSError], None]) -> bool:
        content = delimited.frame(message)
        try:
            written = os.write(self._descriptor, content)
            if written == len(content):
                self.size += written
                return True
            os.ftruncate(self._descriptor, self.size)
        except OSError as error:
            on_error(error)
        else:
            on_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return False

    def close(self) -> None:
        os.close(self._descriptor)
