"""What a machine does to a forwarder: signals before it listens to them, a full disk, a slow network."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from commwatch.agent.spool import names
from commwatch.agent.spool.writer import SpoolWriter
from commwatch.v1 import ingest_pb2
from tests.integration.frame_service import FrameService
from tests.integration.live_service import until
from tests.integration.spooling_rank import LIMIT_S, SpoolingRank, forwarder, upload


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def keeping(stack: ExitStack) -> FrameService:
    service = FrameService()
    service.start()
    stack.callback(service.stop)
    return service


@pytest.fixture
def small_disk(stack: ExitStack, tmp_path: Path) -> Path:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("only root may mount a disk that is small enough to fill")
    stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
    return disk


def fill(disk: Path) -> None:
    with (disk / "fill").open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_git_is_asked_does_not_end_it(
    keeping: FrameService, stack: ExitStack, tmp_path: Path, number: signal.Signals
) -> None:
    """A scheduler signals every process of a job, whatever session it has."""
    asked, answer = tmp_path / "asked", tmp_path / "answer"
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text(f"#!/bin/sh\ntouch {asked}\nwhile [ ! -e {answer} ]; do sleep 0.02; done\nexit 1\n")
    git.chmod(0o755)
    rank = SpoolingRank(tmp_path / "spool")
    stack.callback(rank.stop)
    rank.tell("append 5")
    variables = {"COMMWATCH_PROGRAM_ROOT": str(tmp_path), "PATH": f"{git.parent}:{os.environ['PATH']}"}
    process = forwarder(rank.folder, keeping.endpoint, **variables)
    until(asked.exists)
    process.send_signal(number)
    answer.touch()
    rank.end()
    assert process.wait(LIMIT_S) == 0
    assert keeping.numbers() == [1, 2, 3, 4, 5]


def test_a_forwarder_that_was_just_started_ignores_the_signals_of_its_job(
    keeping: FrameService, stack: ExitStack, tmp_path: Path
) -> None:
    """Its Python is not even up: they are ignored from before its first instruction."""
    variables = {"COMMWATCH_ENDPOINT": keeping.endpoint}
    rank = SpoolingRank(tmp_path / "spool", variables=variables)
    stack.callback(rank.stop)
    rank.tell(f"forward {tmp_path}")
    started = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and str(rank.folder).encode() in command_of(entry).split(b"\0")
    ]
    assert len(started) == 1
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(started[0], number)
    rank.tell("append 5")
    rank.end()
    keeping.until(lambda kept: len(kept.goodbyes) == 1)
    assert keeping.numbers() == [1, 2, 3, 4, 5]


def command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_full_disk_does_not_keep_what_was_spooled_from_being_sent(
    keeping: FrameService, stack: ExitStack, small_disk: Path, tmp_path: Path
) -> None:
    rank = SpoolingRank(small_disk)
    stack.callback(rank.stop)
    rank.tell("append 20")
    fill(small_disk)
    variables = {"COMMWATCH_PROGRAM_ROOT": str(tmp_path), "COMMWATCH_COMMIT": "abc123"}
    process = forwarder(rank.folder, keeping.endpoint, **variables)
    rank.end()
    assert process.wait(LIMIT_S) == 0
    assert keeping.numbers() == list(range(1, 21))
    assert keeping.kept.hellos[0].commit.sha == "abc123"


def test_half_a_spool_does_not_stand_in_the_way_of_the_next(small_disk: Path) -> None:
    folder = small_disk / "run" / "0-0"
    fill(small_disk)
    os.truncate(small_disk / "fill", 128 * 1024)
    with pytest.raises(OSError, match="No space left on device"):
        SpoolWriter(folder, ingest_pb2.Hello(script="x" * 100_000), 1024 * 1024)
    assert not folder.exists()
    (small_disk / "fill").unlink()
    SpoolWriter(folder, ingest_pb2.Hello(script="x" * 100_000), 1024 * 1024)
    assert (folder / names.HELLO).exists()


def test_an_upload_goes_on_as_long_as_it_gets_on(keeping: FrameService, stack: ExitStack, tmp_path: Path) -> None:
    """The deadline is for a service that takes nothing, not for a spool that is large."""
    rank = SpoolingRank(tmp_path / "spool")
    stack.callback(rank.stop)
    rank.tell("append 3000")
    rank.kill()
    began = time.monotonic()

    def slow(request: ingest_pb2.ReportRequest) -> None:
        if request.WhichOneof("message") == "frames":
            time.sleep(0.15)

    keeping.fault = slow
    sent = upload(rank.folder, keeping.endpoint, COMMWATCH_DEADLINE_S="2.5")
    assert sent.returncode == 0, sent.stdout
    assert time.monotonic() - began > 2.5
    assert keeping.numbers() == list(range(1, 3001))
