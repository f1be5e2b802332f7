"""The forwarder's side of the spool: frames from any number on, bodies by hash, deletion of what was acknowledged."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from commwatch.agent.spool import delimited, names, page
from commwatch.v1 import ingest_pb2


class SpoolError(ValueError):
    """The folder is no rank's spool, or what it holds is damaged."""


class SpoolReader:
    """Reads one rank's folder while the rank may still write. Raises SpoolError when there is no hello."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.hello = ingest_pb2.Hello.FromString((folder / names.HELLO).read_bytes())
        except FileNotFoundError:
            raise SpoolError(f"{folder} is no rank's spool: it holds no {names.HELLO}") from None
        except ValueError as error:
            raise SpoolError(f"{folder / names.HELLO} is damaged: {error}") from None
        self._segment: Path | None = None
        self._offset = 0
        self._next = 1
        self._places: dict[bytes, tuple[int, int]] = {}
        self._definitions_offset = 0

    def commit(self) -> ingest_pb2.Commit | None:
        """What ``keep_commit`` kept."""
        path = self.folder / names.COMMIT
        return ingest_pb2.Commit.FromString(path.read_bytes()) if path.exists() else None

    def keep_commit(self, commit: ingest_pb2.Commit) -> None:
        """Keep the commit beside the hello, for whoever sends this spool."""
        part = self.folder / f"{names.COMMIT}.part"
        part.write_bytes(commit.SerializeToString())
        part.rename(self.folder / names.COMMIT)

    def counters(self) -> page.Counters:
        """The rank's counters as they stand. Raises SpoolError."""
        try:
            return page.read_page(self.folder / names.PAGE)
        except (OSError, page.PageError) as error:
            raise SpoolError(f"{self.folder / names.PAGE} cannot be read: {error}") from None

    def frames(self, start: int, *, max_frames: int, max_bytes: int) -> list[ingest_pb2.Frame]:
        """Whole frames from number ``start`` on, within both limits but at least one when there is one."""
        if start != self._next or self._segment is None:
            self._seek(start)
        found: list[ingest_pb2.Frame] = []
        size = 0
        while self._segment is not None and len(found) < max_frames and size < max_bytes:
            for message, offset in self._messages(max_bytes + delimited.MAX_MESSAGE_BYTES):
                if (size and size + len(message) > max_bytes) or len(found) >= max_frames:
                    return found
                self._offset = offset
                frame = self._parse(message)
                if frame.number >= start:
                    found.append(frame)
                    size += len(message)
                    self._next = frame.number + 1
            if not self._advance():
                break
        return found

    def delete_through(self, number: int) -> None:
        """Delete segments all of whose frames are at or below ``number``; never the newest."""
        known = names.segments(self.folder)
        for (_, path), (following, _) in itertools.pairwise(known):
            if following - 1 <= number and path != self._segment:
                path.unlink(missing_ok=True)

    def definition(self, key: bytes) -> ingest_pb2.Definition | None:
        """The body with this hash; None when the spool does not hold it."""
        if key not in self._places:
            self._index_definitions()
        if key not in self._places:
            return None
        start, length = self._places[key]
        with (self.folder / names.DEFINITIONS).open("rb") as file:
            file.seek(start)
            return ingest_pb2.Definition.FromString(file.read(length))

    def delete(self) -> None:
        """Delete the folder, and the run's when it is empty then."""
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.parent.rmdir()
        except OSError:  # other ranks are still there
            return

    def _seek(self, start: int) -> None:
        known = names.segments(self.folder)
        holding = [path for first, path in known if first <= start]
        self._segment = holding[-1] if holding else known[0][1] if known else None
        self._offset = 0
        self._next = start

    def _advance(self) -> bool:
        """Go to the following segment when this one is read to its end. False when there is none yet."""
        assert self._segment is not None
        later = [path for _, path in names.segments(self.folder) if path.name > self._segment.name]
        if not later:
            return False
        # The writer opens a segment after it finished the one before: look once more for what came in between.
        if next(iter(self._messages(delimited.MAX_MESSAGE_BYTES)), None) is None:
            self._segment, self._offset = later[0], 0
        return True

    def _messages(self, limit: int) -> list[tuple[bytes, int]]:
        assert self._segment is not None
        try:
            with self._segment.open("rb") as file:
                file.seek(self._offset)
                content = file.read(limit)
        except FileNotFoundError:
            return []
        start = self._offset
        try:
            return [(message, start + offset) for message, offset in delimited.messages(content)]
        except delimited.DelimitedError as error:
            raise SpoolError(f"{self._segment} is damaged: {error}") from None

    def _parse(self, message: bytes) -> ingest_pb2.Frame:
        try:
            return ingest_pb2.Frame.FromString(message)
        except ValueError as error:
            raise SpoolError(f"{self._segment} is damaged: {error}") from None

    def _index_definitions(self) -> None:
        try:
            with (self.folder / names.DEFINITIONS).open("rb") as file:
                file.seek(self._definitions_offset)
                content = file.read()
        except FileNotFoundError:
            return
        base, end = self._definitions_offset, 0
        for message, end in delimited.messages(content):
            key = ingest_pb2.Definition.FromString(message).hash
            self._places[key] = (base + end - len(message), len(message))
        self._definitions_offset = base + end
