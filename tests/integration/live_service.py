"""A real ``commwatch serve`` process on loopback, that tests may kill and start again."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from commwatch.client import Client
from commwatch.service.store.contract import Store
from commwatch.service.store.opening import database_url, open_store

Found = TypeVar("Found")
READY = re.compile(r"commwatch ready: http (?P<http>\S+)\s+grpc (?P<grpc>\S+)")
LIMIT_S = 60.0


def free_port() -> int:
    """A loopback port that was free a moment ago: for a service that must come back at the same place."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(look: Callable[[], Found], limit_s: float = LIMIT_S) -> Found:
    """What ``look`` returns once it is true. Raises AssertionError at the deadline."""
    deadline = time.monotonic() + limit_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"did not hold within {limit_s:.0f} s"
        select.select([], [], [], 0.05)


class LiveService:
    """Start it, kill it, start it again on the same database and ports."""

    def __init__(self, folder: Path) -> None:
        self.database = folder / "commwatch.db"
        self._log = folder / "service.log"
        self._grpc = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        self.http_url = ""
        self.endpoint = self._grpc

    def start(self) -> None:
        """Returns when the service is ready."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("COMMWATCH_")}
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "commwatch.service.cli", "serve", "--db", str(self.database)),
                    *("--http-listen", "127.0.0.1:0", "--grpc-listen", self._grpc),
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**clean, "COMMWATCH_LOST_AFTER_S": "20"},
            )
        assert self._process.stdout is not None
        text = ""
        while not (found := READY.search(text)):
            readable, _, _ = select.select([self._process.stdout], [], [], LIMIT_S)
            chunk = os.read(self._process.stdout.fileno(), 4096).decode() if readable else ""
            assert chunk, self._log.read_text()
            text += chunk
        self.http_url = found["http"]

    def kill(self) -> None:
        """SIGKILL: nothing is said, nothing is flushed."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that does not end it."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def client(self) -> Client:
        """A client of its HTTP API."""
        return Client(self.http_url)

    def store(self) -> Store:
        """Its database, read beside it."""
        return open_store(database_url(str(self.database)), migrate=False)

    def only_run(self, state: str = "complete") -> str:
        """Id of the only run once it has that state."""

        def look() -> str:
            with self.client() as client:
                runs = client.runs()["runs"]
            assert len(runs) <= 1
            return runs[0]["id"] if runs and runs[0]["state"] == state else ""

        return until(look)
