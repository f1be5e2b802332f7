"""Drives ``programs/spooling.py``: a rank without torch, and its forwarder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.integration.ranks import PROGRAMS, rank_environment

RUN_ID = "01938ddd-0000-7000-8000-000000000001"
LIMIT_S = 60
MAX_BYTES = 64 * 1024 * 1024


class SpoolingRank:
    """A process in a session of its own, so that a test may kill its whole process group."""

    def __init__(self, spool: Path, max_bytes: int = MAX_BYTES, variables: Mapping[str, str] | None = None) -> None:
        self.folder = spool / RUN_ID / "0-0"
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "spooling.py"), str(spool), str(max_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=rank_environment(variables),
            start_new_session=True,
        )
        self._answer("ready")

    def tell(self, line: str) -> None:
        """Have it done."""
        self._send(line)
        self._answer("done")

    def end(self, how: str = "clean,") -> None:
        """Say how it ended, and end."""
        self.tell(f"close {how}")
        self._send("end")
        self.process.wait(LIMIT_S)

    def kill(self) -> None:
        """SIGKILL by itself: nothing is said."""
        self._send("kill")
        self.process.wait(LIMIT_S)

    def stop(self) -> None:
        """For the end of a test."""
        self.process.kill()
        self.process.communicate()

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _answer(self, expected: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == expected


def forwarder(folder: Path, endpoint: str, **variables: str) -> subprocess.Popen[bytes]:
    """``python -m commwatch.agent.forwarder`` as a child of the test."""
    environment = {"COMMWATCH_ENDPOINT": endpoint, "COMMWATCH_HEARTBEAT_S": "0.05", **variables}
    command = [sys.executable, "-m", "commwatch.agent.forwarder", str(folder)]
    return subprocess.Popen(command, env=rank_environment(environment), start_new_session=True)


def upload(folder: Path, endpoint: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``commwatch upload``."""
    command = [sys.executable, "-m", "commwatch.service.cli", "upload", str(folder), "--endpoint", endpoint]
    return subprocess.run(
        command, env=rank_environment(variables), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
