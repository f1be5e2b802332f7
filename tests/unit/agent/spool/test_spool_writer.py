from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from commwatch.agent.spool import names
from commwatch.agent.spool.page import CLEAN, EXCEPTION, Numbers
from commwatch.agent.spool.reader import SpoolReader
from commwatch.agent.spool.writer import SpoolWriter
from commwatch.v1 import ingest_pb2, records_pb2

LIMIT_BYTES = 1024 * 1024
PATTERN = ingest_pb2.DEFINITION_KIND_PATTERN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "run" / "0-0"


def writer(folder: Path, max_bytes: int = LIMIT_BYTES) -> SpoolWriter:
    return SpoolWriter(folder, ingest_pb2.Hello(run_id="run", pid=os.getpid()), max_bytes)


def facts(size: int = 0) -> records_pb2.Facts:
    return records_pb2.Facts(device_type="cpu", backend="g" * size)


def numbers(folder: Path) -> list[int]:
    frames = SpoolReader(folder).frames(1, max_frames=1_000_000, max_bytes=1 << 30)
    return [frame.number for frame in frames]


def used_bytes(folder: Path) -> int:
    files = [path for _, path in names.segments(folder)] + [folder / names.DEFINITIONS]
    return sum(path.stat().st_size for path in files)


def test_the_folder_is_its_owners_alone(folder: Path) -> None:
    writer(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_frames_are_numbered_from_one_and_hold_what_was_appended(folder: Path) -> None:
    spool = writer(folder)
    assert spool.append(facts())
    assert spool.append(records_pb2.StepRange(number=1, first_step=1, last_step=3, steps=3))
    first, second = SpoolReader(folder).frames(1, max_frames=10, max_bytes=1000)
    assert first == ingest_pb2.Frame(number=1, facts=facts())
    assert (second.number, second.range.last_step) == (2, 3)


def test_a_comparison_and_a_capture_are_frames_too(folder: Path) -> None:
    spool = writer(folder)
    compared = records_pb2.Completeness(step=3, unequal_steps=1)
    captured = records_pb2.Capture(step=2, part=1, last_part=True)
    assert spool.append(compared)
    assert spool.append(captured)
    assert list(SpoolReader(folder).frames(1, max_frames=10, max_bytes=1000)) == [
        ingest_pb2.Frame(number=1, completeness=compared),
        ingest_pb2.Frame(number=2, capture=captured),
    ]


def test_an_abandoned_spool_leaves_its_place_to_another(folder: Path) -> None:
    spool = writer(folder)
    spool.append(facts())
    spool.abandon()
    assert not folder.exists()
    assert not spool.append(facts())
    assert writer(folder).append(facts())


def test_a_body_is_kept_once_under_the_hash_of_its_kind_and_content(folder: Path) -> None:
    spool = writer(folder)
    key = spool.define(PATTERN, b"body")
    size = (folder / names.DEFINITIONS).stat().st_size
    assert key == hashlib.blake2b(b"\x01body", digest_size=16).digest()
    assert spool.define(PATTERN, b"body") == key
    assert spool.define(ingest_pb2.DEFINITION_KIND_LINES, b"body") != key
    reader = SpoolReader(folder)
    assert reader.definition(key) == ingest_pb2.Definition(kind=PATTERN, hash=key, content=b"body")
    assert reader.definition(bytes(16)) is None
    assert size == len(ingest_pb2.Definition(kind=PATTERN, hash=key, content=b"body").SerializeToString()) + 1


def test_a_record_whose_body_was_never_kept_is_dropped(folder: Path) -> None:
    spool = writer(folder)
    assert not spool.append(records_pb2.StepRange(number=1, pattern_hash=b"x" * 16))
    assert spool.append(facts())
    assert (spool.dropped_frames, numbers(folder)) == (1, [1])


def test_a_full_spool_drops_without_taking_a_number_and_goes_on_when_segments_are_deleted(folder: Path) -> None:
    limit = 64 * 1024
    spool = writer(folder, limit)
    kept = 0
    while spool.append(facts(1000)):
        kept += 1
    assert used_bytes(folder) <= limit
    assert used_bytes(folder) > limit - 1100
    assert not spool.append(facts(1000))
    assert spool.dropped_frames == 2
    assert spool.reason == "the spool reached its limit of 65536 bytes (COMMWATCH_SPOOL_MAX_BYTES)"
    assert SpoolReader(folder).counters().reason == spool.reason
    reader = SpoolReader(folder)
    assert len(reader.frames(1, max_frames=10_000, max_bytes=1 << 30)) == kept
    reader.delete_through(kept)
    assert spool.append(facts(1000))
    (frame,) = reader.frames(kept + 1, max_frames=10, max_bytes=1 << 20)
    assert frame.number == kept + 1


def test_a_message_too_large_to_be_read_again_is_dropped(folder: Path) -> None:
    spool = writer(folder, 64 * LIMIT_BYTES)
    assert not spool.append(facts(17 * 1024 * 1024))
    assert spool.append(facts())
    assert numbers(folder) == [1]


def test_how_the_rank_ended_is_on_the_page(folder: Path) -> None:
    spool = writer(folder)
    spool.publish(Numbers(range_number=1, last_step=9, range_steps=9, steps=9, calls=27))
    spool.close("exception", "RuntimeError")
    counters = SpoolReader(folder).counters()
    assert (counters.ending, counters.detail, counters.calls) == (EXCEPTION, "RuntimeError", 27)


def test_a_closed_spool_takes_nothing_more(folder: Path) -> None:
    spool = writer(folder)
    spool.close("clean", "")
    assert not spool.append(facts())
    spool.define(PATTERN, b"late")
    spool.close("exception", "again")
    assert SpoolReader(folder).counters().ending == CLEAN
    assert numbers(folder) == []


def test_a_spool_is_never_written_over(folder: Path) -> None:
    writer(folder).append(facts())
    with pytest.raises(FileExistsError, match="COMMWATCH_RUN_ID"):
        writer(folder)
    assert numbers(folder) == [1]


def test_a_forked_child_writes_nothing(folder: Path) -> None:
    spool = writer(folder)
    assert spool.append(facts())
    child = os.fork()
    if child == 0:  # no exception and no pytest in here
        silent = not spool.append(facts())
        spool.define(PATTERN, b"child")
        spool.publish(Numbers(7, 7, 7, 7, 7, 7, 7))
        spool.note("child")
        spool.close("exception", "child")
        os._exit(0 if silent else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert spool.append(facts())
    counters = SpoolReader(folder).counters()
    assert (counters.steps, counters.ending, counters.reason) == (0, 0, "")
    assert numbers(folder) == [1, 2]
    assert (folder / names.DEFINITIONS).stat().st_size == 0


def test_what_was_appended_survives_sigkill(folder: Path) -> None:
    program = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from commwatch.agent.spool.page import Numbers\n"
        "from commwatch.agent.spool.writer import SpoolWriter\nfrom commwatch.v1 import ingest_pb2, records_pb2\n"
        "spool = SpoolWriter(Path(sys.argv[1]), ingest_pb2.Hello(pid=os.getpid()), 1 << 20)\n"
        "for step in range(1, 51):\n"
        "    spool.append(records_pb2.StepRange(number=1, first_step=1, last_step=step, steps=step))\n"
        "    spool.publish(Numbers(1, step, step, step, 3 * step))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(folder)], check=False, timeout=60).returncode == -9
    reader = SpoolReader(folder)
    assert [frame.number for frame in reader.frames(1, max_frames=100, max_bytes=1 << 20)] == list(range(1, 51))
    counters = reader.counters()
    assert (counters.steps, counters.calls, counters.ending) == (50, 150, 0)
    assert reader.process.ended()


def test_a_write_that_stops_in_the_middle_leaves_no_torn_frame(folder: Path) -> None:
    """A limit on the size of files stops a write half-way, as a full disk does."""
    spool = writer(folder)
    assert spool.append(facts(100))
    size = names.segment(folder, 1).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, hard))
        assert not spool.append(facts(100))
        assert not spool.append(facts(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names.segment(folder, 1).stat().st_size == size
    assert spool.dropped_frames == 2
    assert spool.reason.startswith("cannot write the spool: ")
    assert spool.append(facts(100))
    assert numbers(folder) == [1, 2]


def test_a_full_disk_drops_and_counts(tmp_path: Path) -> None:
    """On a file system of its own, so that the disk is really full."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("only root may mount; the test above stops writes in the middle without it")
    try:
        folder = mount / "run" / "0-0"
        spool = writer(folder)
        kept = 0
        while spool.append(facts(3000)):
            kept += 1
        assert 0 < kept < 90
        assert spool.reason == "cannot write the spool: No space left on device"
        assert numbers(folder) == list(range(1, kept + 1))
        assert SpoolReader(folder).counters().reason == spool.reason
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)  # the page is still mapped


def test_a_body_that_found_no_room_is_kept_once_there_is_some(folder: Path) -> None:
    spool = writer(folder, 64 * 1024)
    while spool.append(facts(1000)):
        pass
    key = spool.define(PATTERN, b"p" * 3000)
    steps = records_pb2.StepRange(number=1, first_step=1, last_step=1, steps=1, pattern_hash=key)
    assert not spool.append(steps)
    assert spool.dropped_frames == 2
    reader = SpoolReader(folder)
    assert reader.definition(key) is None
    last = reader.last_number()
    reader.delete_through(last)
    assert spool.append(steps)
    found = reader.definition(key)
    assert found is not None
    assert found.content == b"p" * 3000
    assert [frame.range for frame in reader.frames(last + 1, max_frames=10, max_bytes=1 << 20)] == [steps]
    assert spool.dropped_frames == 2


def test_bodies_that_found_no_room_do_not_pile_up(folder: Path) -> None:
    spool = writer(folder, 64 * 1024)
    keys = [spool.define(PATTERN, bytes([number]) * 1024 * 1024) for number in range(8)]
    assert len(set(keys)) == 8
    assert spool._unkept_bytes <= 4 * 1024 * 1024
    assert list(spool._unkept) == keys[-3:]
