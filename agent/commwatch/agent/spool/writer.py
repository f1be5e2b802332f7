"""The rank's side of the spool: never waits, never raises into the job, counts what it drops.

Every append is one ``write`` to the kernel, so that SIGKILL of the rank loses nothing that was appended. A write that
went wrong in the middle (a full disk) is taken back, so that a torn message never stands before a whole one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections import OrderedDict, deque
from pathlib import Path
from typing import TypeAlias

from commwatch.agent.spool import delimited, names, page
from commwatch.agent.spool.append_file import AppendFile
from commwatch.agent.spool.folder import make_rank_directory
from commwatch.agent.spool.process import keep_process
from commwatch.v1 import ingest_pb2, records_pb2

SEGMENT_BYTES = 1024 * 1024
SEGMENTS_PER_SPOOL = 4
"""A segment goes when all of it is acknowledged: a spool of one segment could never shrink."""
UNKEPT_BYTES = 4 * 1024 * 1024

Content: TypeAlias = records_pb2.StepRange | records_pb2.Facts | records_pb2.Completeness | records_pb2.Capture
"""What a frame may hold."""


class SpoolWriter:
    """Creates the folder. Raises OSError when it cannot; afterwards nothing raises.

    A folder that holds a spool already is refused: its records may not be sent yet, and the frame numbers of two spools
    of one rank would collide at the service.
    """

    def __init__(self, folder: Path, hello: ingest_pb2.Hello, max_bytes: int) -> None:
        make_rank_directory(folder)
        self.folder = folder
        self.dropped_frames = 0
        self.reason = ""
        self._max_bytes = max_bytes
        self._segment_bytes = min(SEGMENT_BYTES, max_bytes // SEGMENTS_PER_SPOOL)
        self._pid = os.getpid()
        self._closed = False
        self._defined: set[bytes] = set()
        self._unkept: OrderedDict[bytes, bytes] = OrderedDict()
        self._unkept_bytes = 0
        self._frames = 0
        self._older: deque[tuple[Path, int]] = deque()
        self._older_bytes = 0
        try:
            self._page = page.PageWriter(folder / names.PAGE)
        except FileExistsError:
            text = "another launch of this run left its records there: `commwatch upload` sends them; set a new"
            raise FileExistsError(errno.EEXIST, f"{text} COMMWATCH_RUN_ID for each launch", str(folder)) from None
        try:
            self._create(hello)
        except OSError:  # half a spool would stand in the way of the next attempt
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _create(self, hello: ingest_pb2.Hello) -> None:
        folder = self.folder
        self._definitions = AppendFile(folder / names.DEFINITIONS, self._note_error)
        self._segment = AppendFile(names.segment(folder, 1), self._note_error)
        keep_process(folder, self._pid)
        part = folder / f"{names.HELLO}.part"
        part.write_bytes(hello.SerializeToString())
        part.rename(folder / names.HELLO)

    def define(self, kind: int, content: bytes) -> bytes:
        """Keep a body once; returns its hash. Ranges that refer to a body that could not be kept are dropped too.

        Such a body is tried again when something refers to it, as long as it is among the newest 4 MiB of them.
        """
        key = hashlib.blake2b(bytes([kind]) + content, digest_size=16).digest()
        if key not in self._defined and self._writable():
            value = ingest_pb2.DefinitionKind.ValueType(kind)
            message = ingest_pb2.Definition(kind=value, hash=key, content=content).SerializeToString()
            if not self._keep_body(key, message):
                self._remember(key, message)
        return key

    def append(self, content: Content) -> bool:
        """Keep one record under the next number. False when it was dropped: a dropped record takes no number."""
        if not self._writable():
            return False
        message = ingest_pb2.Frame(number=self._frames + 1)
        if isinstance(content, records_pb2.StepRange):
            message.range.CopyFrom(content)
        elif isinstance(content, records_pb2.Facts):
            message.facts.CopyFrom(content)
        elif isinstance(content, records_pb2.Completeness):
            message.completeness.CopyFrom(content)
        else:
            message.capture.CopyFrom(content)
        if self._segment.size >= self._segment_bytes:
            self._rotate()
        bulky = isinstance(content, records_pb2.Capture) and bool(content.records)
        if self._refers_to_kept(content) and self._write(self._segment, message.SerializeToString(), bulky=bulky):
            self._frames += 1
            return True
        self.dropped_frames += 1
        return False

    def publish(self, numbers: page.Numbers) -> None:
        """Show the counters to the forwarder."""
        if self._writable():
            self._page.publish(numbers)

    def requested(self) -> tuple[int, int]:
        """(number, steps) of the newest capture request; (0, 0) before the first."""
        return self._page.requested()

    def note(self, reason: str) -> None:
        """Say why something was dropped, in one sentence. The first reason stays."""
        if not self.reason and self._writable():
            self.reason = reason
            self._page.end(page.RUNNING, "", reason)

    def close(self, ending: str, detail: str) -> None:
        """Say how the rank ended: ``clean`` or ``exception``. Nothing is written afterwards."""
        if self._writable():
            self._closed = True
            self._page.end(page.CLEAN if ending == "clean" else page.EXCEPTION, detail, self.reason)
            self._segment.close()
            self._definitions.close()

    def abandon(self) -> None:
        """Recording did not start after all: take the folder away, as if there had never been a spool."""
        if self._writable():
            self._closed = True
            self._segment.close()
            self._definitions.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _writable(self) -> bool:
        """Not in a forked child, whose memory and descriptors are those of the rank."""
        return not self._closed and os.getpid() == self._pid

    def _refers_to_kept(self, content: Content) -> bool:
        for key in _references(content):
            if not key or key in self._defined:
                continue
            message = self._unkept.get(key)
            if message is None or not self._keep_body(key, message):
                return False
            del self._unkept[key]
            self._unkept_bytes -= len(message)
        return True

    def _keep_body(self, key: bytes, message: bytes) -> bool:
        if not self._write(self._definitions, message):
            return False
        self._defined.add(key)
        return True

    def _remember(self, key: bytes, message: bytes) -> None:
        if key in self._unkept:
            return
        self._unkept[key] = message
        self._unkept_bytes += len(message)
        while self._unkept_bytes > UNKEPT_BYTES:
            _, oldest = self._unkept.popitem(last=False)
            self._unkept_bytes -= len(oldest)

    def _write(self, file: AppendFile, message: bytes, *, bulky: bool = False) -> bool:
        if len(message) > delimited.MAX_MESSAGE_BYTES:
            self.note(f"a record of {len(message)} bytes is larger than {delimited.MAX_MESSAGE_BYTES}")
            return False
        framed = delimited.frame(message)
        return self._room(len(framed), bulky=bulky) and file.append(framed)

    def _room(self, size: int, *, bulky: bool) -> bool:
        """Captures fill half of the spool at most: they go before steps do, and say so themselves."""
        most = self._max_bytes // 2 if bulky else self._max_bytes
        used = self._segment.size + self._definitions.size + size
        if self._older_bytes + used <= most:
            return True
        self._forget_deleted()
        if self._older_bytes + used <= most:
            return True
        if not bulky:
            self.note(f"the spool reached its limit of {self._max_bytes} bytes (COMMWATCH_SPOOL_MAX_BYTES)")
        return False

    def _rotate(self) -> None:
        try:
            following = AppendFile(names.segment(self.folder, self._frames + 1), self._note_error)
        except OSError as error:
            self._note_error(error)
            return
        self._segment.close()
        self._older.append((self._segment.path, self._segment.size))
        self._older_bytes += self._segment.size
        self._segment = following

    def _forget_deleted(self) -> None:
        """The forwarder deletes what was acknowledged, the oldest first."""
        while self._older and not self._older[0][0].exists():
            self._older_bytes -= self._older.popleft()[1]

    def _note_error(self, error: OSError) -> None:
        self.note(f"cannot write the spool: {error.strerror or error}")


def _references(content: Content) -> tuple[bytes, ...]:
    if isinstance(content, records_pb2.Facts):
        return (content.modules_hash,)
    if not isinstance(content, records_pb2.StepRange):
        return ()
    return content.pattern_hash, content.shapes_hash, content.lines_hash
