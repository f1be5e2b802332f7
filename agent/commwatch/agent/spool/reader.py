"""The forwarder's side of the spool: frames from any number on, bodies by hash, deletion of what was acknowledged."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from commwatch.agent.spool import delimited, names, page
from commwatch.agent.spool.process import RankProcess
from commwatch.v1 import ingest_pb2

_Parsed = TypeVar("_Parsed", bound=Message)
READ_BYTES = 1024 * 1024


class SpoolError(ValueError):
    """The folder is no rank's spool, or what it holds is damaged."""


class SpoolReader:
    """Reads one rank's folder while the rank may still write. Raises SpoolError when there is no hello."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            content = (folder / names.HELLO).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise SpoolError(f"{folder} is no rank's spool: it holds no {names.HELLO}") from None
        self.hello = _parse(ingest_pb2.Hello, content, folder / names.HELLO)
        self.process = RankProcess(folder, self.hello.pid)
        self._lock = -1
        self._segment: tuple[int, Path] | None = None
        self._offset = 0
        self._next = 1
        self._places: dict[bytes, tuple[int, int]] = {}
        self._definitions_offset = 0

    def lock(self) -> bool:
        """Become the only sender of this spool until this process ends. False when another one is. Raises OSError."""
        descriptor = os.open(self.folder / names.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:  # a file system without locks: the only sender, as far as anybody can tell
            os.close(descriptor)
            return True
        self._lock = descriptor
        return True

    def commit(self) -> ingest_pb2.Commit | None:
        """What ``keep_commit`` kept. Raises SpoolError."""
        path = self.folder / names.COMMIT
        return _parse(ingest_pb2.Commit, path.read_bytes(), path) if path.exists() else None

    def keep_commit(self, commit: ingest_pb2.Commit) -> None:
        """Keep the commit beside the hello, for whoever sends this spool."""
        part = self.folder / f"{names.COMMIT}.part"
        part.write_bytes(commit.SerializeToString())
        part.rename(self.folder / names.COMMIT)

    def request_capture(self, number: int, steps: int) -> None:
        """Ask the rank to capture steps. Raises OSError."""
        page.request_capture(self.folder / names.PAGE, number, steps)

    def counters(self) -> page.Counters:
        """The rank's counters as they stand. Raises SpoolError."""
        try:
            return page.read_page(self.folder / names.PAGE)
        except (OSError, page.PageError) as error:
            raise SpoolError(f"{self.folder / names.PAGE} cannot be read: {error}") from None

    def frames(self, start: int, *, max_frames: int, max_bytes: int) -> list[ingest_pb2.Frame]:
        """Whole frames from number ``start`` on, within both limits but at least one when there is one.

        The first has a higher number when ``start`` was deleted. Raises SpoolError.
        """
        if start != self._next or self._segment is None:
            self._seek(start)
        found: list[ingest_pb2.Frame] = []
        size = 0
        while self._segment is not None and len(found) < max_frames and size < max_bytes:
            path = self._segment[1]
            for message, offset in _messages(path, self._offset):
                if (size and size + len(message) > max_bytes) or len(found) >= max_frames:
                    return found
                frame = _parse(ingest_pb2.Frame, message, path)
                self._offset = offset
                if frame.number >= start:
                    found.append(frame)
                    size += len(message)
                    self._next = frame.number + 1
            if not self._advance():
                break
        return found

    def last_number(self) -> int:
        """Number of the newest whole frame; 0 when there is none yet. Raises SpoolError."""
        known = names.segments(self.folder)
        if not known:
            return 0
        first, path = known[-1]
        return first - 1 + sum(1 for _ in _messages(path, 0))

    def delete_through(self, number: int) -> None:
        """Delete segments all of whose frames are at or below ``number``; never the newest."""
        for (first, path), (following, _) in itertools.pairwise(names.segments(self.folder)):
            if following - 1 <= number and (self._segment is None or first != self._segment[0]):
                path.unlink(missing_ok=True)

    def definition(self, key: bytes) -> ingest_pb2.Definition | None:
        """The body with this hash; None when the spool does not hold it. Raises SpoolError."""
        path = self.folder / names.DEFINITIONS
        if key not in self._places:
            self._index_definitions(path)
        if key not in self._places:
            return None
        start, length = self._places[key]
        with path.open("rb") as file:
            file.seek(start)
            return _parse(ingest_pb2.Definition, file.read(length), path)

    def delete(self) -> None:
        """Delete the folder, and the run's when it is empty then."""
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.parent.rmdir()
        except OSError:  # other ranks are still there
            return

    def _seek(self, start: int) -> None:
        known = names.segments(self.folder)
        holding = [entry for entry in known if entry[0] <= start]
        self._segment = holding[-1] if holding else known[0] if known else None
        self._offset = 0
        self._next = start

    def _advance(self) -> bool:
        """Go to the following segment when this one is read to its end. False when there is none yet."""
        assert self._segment is not None
        number, path = self._segment
        later = [entry for entry in names.segments(self.folder) if entry[0] > number]
        if not later:
            return False
        # The writer opens a segment after it finished the one before: look once more for what came in between.
        if next(_messages(path, self._offset), None) is None:
            self._segment, self._offset = later[0], 0
        return True

    def _index_definitions(self, path: Path) -> None:
        for message, end in _messages(path, self._definitions_offset):
            key = _parse(ingest_pb2.Definition, message, path).hash
            self._places[key] = (end - len(message), len(message))
            self._definitions_offset = end


def _messages(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """(message, offset behind it) for each whole message of a file from an offset on. A file that is gone has none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        content = b""
        while True:
            chunk = file.read(READ_BYTES)
            content += chunk
            used = 0
            try:
                for message, used in delimited.messages(content):
                    yield message, offset + used
            except delimited.DelimitedError as error:
                raise SpoolError(f"{path} is damaged behind byte {offset + used}: {error}") from None
            offset += used
            content = content[used:]
            if len(chunk) < READ_BYTES:
                return


def _parse(kind: type[_Parsed], content: bytes, path: Path) -> _Parsed:
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise SpoolError(f"{path} is damaged: {error}") from None
