"""Names of the files in a rank's folder."""

from __future__ import annotations

from pathlib import Path

HELLO = "hello.binpb"
COMMIT = "commit.binpb"
DEFINITIONS = "definitions.spool"
PAGE = "page"
LOG = "forwarder.log"
PROCESS = "process"
LOCK = "lock"
_SEGMENT = "frames-{:08d}.spool"


def segment(folder: Path, number: int) -> Path:
    """File of a segment; ``number`` is that of its first frame, so that a reader need not count."""
    return folder / _SEGMENT.format(number)


def segments(folder: Path) -> list[tuple[int, Path]]:
    """(number of the first frame, file), in order."""
    found = []
    for path in folder.glob("frames-*.spool"):
        digits = path.stem.partition("-")[2]
        if digits.isdigit():
            found.append((int(digits), path))
    return sorted(found)
