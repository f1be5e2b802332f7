"""A file that holds whole messages only."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path


class AppendFile:
    """Creates the file, which must not exist. Raises OSError; afterwards errors go to ``on_error``."""

    def __init__(self, path: Path, on_error: Callable[[OSError], None]) -> None:
        self.path = path
        self.size = 0
        self._on_error = on_error
        self._torn = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)

    def append(self, content: bytes) -> bool:
        """Write a framed message, whole or not at all: what went wrong in the middle is taken back."""
        try:
            if self._torn:
                self._take_back()
            written = os.write(self._descriptor, content)
            if written == len(content):
                self.size += written
                return True
            self._take_back()
        except OSError as error:
            self._on_error(error)
        else:
            self._on_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return False

    def close(self) -> None:
        """Close it. Nothing may be appended afterwards."""
        os.close(self._descriptor)

    def _take_back(self) -> None:
        self._torn = True
        os.ftruncate(self._descriptor, self.size)
        self._torn = False
