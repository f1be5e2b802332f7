"""The processes of the demonstration: the service, and the job under torchrun."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY = re.compile(r"commwatch ready: http (?P<http>\S+)\s+grpc (?P<grpc>\S+)")
START_LIMIT_S = 60.0
CAPTURED_STEP = 3
JOB_LIMIT_S = 300.0


class DemoError(Exception):
    """A stage failed; the message says which and what the process printed last."""


@dataclass(frozen=True, slots=True)
class Service:
    """Where the demonstration's own service listens."""

    http_url: str
    grpc_address: str


def _environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COMMWATCH_")}
    return {**clean, **variables}


@contextmanager
def service(folder: Path) -> Iterator[Service]:
    """``commwatch serve`` on free loopback ports with a database of its own, ended by SIGTERM."""
    log = folder / "service.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "commwatch.service.cli", "serve", "--db", str(folder / "commwatch.db")),
                *("--http-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0"),
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(),
        )
    try:
        yield _ready(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path) -> Service:
    assert process.stdout is not None
    deadline = time.monotonic() + START_LIMIT_S
    text = ""
    while time.monotonic() < deadline:
        readable, _, _ = select.select([process.stdout], [], [], 0.5)
        if readable:
            chunk = os.read(process.stdout.fileno(), 4096).decode(errors="replace")
            text += chunk
            found = READY.search(text)
            if found:
                return Service(found["http"], found["grpc"])
            if not chunk:
                break
    raise DemoError(f"the service did not start:\n{_tail(log)}")


def train(repository: Path, endpoint: str, log: Path, steps: int, on_line: Callable[[str], None]) -> None:
    """Run the job on four gloo ranks, with nothing imported, and capture one step. Raises DemoError when it fails."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=4"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "train.py"),
    ]
    variables = {"STEPS": str(steps), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    variables["COMMWATCH_CAPTURE_STEPS"] = str(CAPTURED_STEP)
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=repository,
            env=_environment(COMMWATCH_ENDPOINT=endpoint, COMMWATCH_SPOOL_DIR=str(log.parent / "spool"), **variables),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    limit = threading.Timer(JOB_LIMIT_S, process.kill)
    limit.start()
    try:
        for line in process.stdout:
            on_line(line.rstrip())
        code = process.wait()
    finally:
        limit.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
    if code:
        raise DemoError(f"the job failed with exit code {code} (limit {JOB_LIMIT_S:.0f} s):\n{_tail(log)}")


def command(url: str, repository: Path, *arguments: str) -> tuple[int, str]:
    """Run a commwatch command as a user would; returns exit code and output."""
    finished = subprocess.run(
        [sys.executable, "-m", "commwatch.service.cli", *arguments],
        cwd=repository,
        env=_environment(COMMWATCH_URL=url),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return finished.returncode, finished.stdout.rstrip()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-15:]
    return "\n".join(f"  {line}" for line in lines)
