"""Creates a rank's folder, for its owner alone."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

ATTEMPTS = 10


def make_spool_dir(folder: Path) -> None:
    """Create the folder of all spools where it is missing. Raises OSError.

    The default lies in a folder where everybody may create: what somebody else put there under its name is refused.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    parent = folder.parent.stat()
    if parent.st_mode & stat.S_ISVTX and parent.st_mode & stat.S_IWOTH:
        _require_own(folder)


def make_rank_directory(folder: Path) -> None:
    """Create ``<spool>/<run>/<rank>`` where it is missing. Raises OSError."""
    make_spool_dir(folder.parent.parent)
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(FileNotFoundError):  # a forwarder deleted the run's folder: it had become empty
            return _make_levels(folder)
    return _make_levels(folder)


def _make_levels(folder: Path) -> None:
    for level in (folder.parent, folder):
        level.mkdir(mode=0o700, exist_ok=True)
        _require_own(level)


def _require_own(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it is not a folder of this user", str(folder))
