from __future__ import annotations

import os
from pathlib import Path

import pytest

from commwatch.agent.spool import delimited, names
from commwatch.agent.spool.reader import SpoolError, SpoolReader
from commwatch.agent.spool.writer import SpoolWriter
from commwatch.v1 import ingest_pb2, records_pb2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "run" / "0-0"


def filled(folder: Path, count: int, size: int = 1000) -> SpoolWriter:
    """Some segments of 16 KiB."""
    spool = SpoolWriter(folder, ingest_pb2.Hello(pid=os.getpid()), 64 * 1024)
    for _ in range(count):
        assert spool.append(records_pb2.Facts(backend="g" * size))
    return spool


def read(reader: SpoolReader, start: int, most: int = 10_000) -> list[int]:
    return [frame.number for frame in reader.frames(start, max_frames=most, max_bytes=1 << 30)]


@pytest.mark.parametrize("length", [1, 127, 128, 300, 16_383, 16_384])
def test_what_is_framed_is_read_again(length: int) -> None:
    content = bytes([7]) * length
    assert list(delimited.messages(delimited.frame(content) * 2)) == [
        (content, len(delimited.frame(content))),
        (content, 2 * len(delimited.frame(content))),
    ]


def test_every_torn_tail_is_left_for_later() -> None:
    whole, torn = delimited.frame(b"whole"), delimited.frame(b"t" * 200)
    for length in range(len(torn)):
        assert list(delimited.messages(whole + torn[:length])) == [(b"whole", len(whole))]


def test_frames_are_read_over_segments_from_any_number(folder: Path) -> None:
    filled(folder, 50)
    assert len(names.segments(folder)) == 3
    for start in (1, 2, 17, 18, 50):
        assert read(SpoolReader(folder), start) == list(range(start, 51))
    assert read(SpoolReader(folder), 51) == []


def test_batches_keep_both_limits_and_hold_at_least_one_frame(folder: Path) -> None:
    filled(folder, 30)
    reader = SpoolReader(folder)
    assert read(reader, 1, most=7) == [1, 2, 3, 4, 5, 6, 7]
    assert [frame.number for frame in reader.frames(8, max_frames=100, max_bytes=2500)] == [8, 9]
    assert [frame.number for frame in reader.frames(10, max_frames=100, max_bytes=1)] == [10]


def test_a_reader_follows_a_writer(folder: Path) -> None:
    spool = filled(folder, 1)
    reader = SpoolReader(folder)
    assert read(reader, 1) == [1]
    for number in range(2, 41):
        assert read(reader, number) == []
        spool.append(records_pb2.Facts(backend="g" * 1000))
        assert read(reader, number) == [number]


def test_a_partial_last_frame_is_read_once_it_is_whole(folder: Path) -> None:
    filled(folder, 2)
    frame = delimited.frame(ingest_pb2.Frame(number=3, facts=records_pb2.Facts(backend="late")).SerializeToString())
    reader = SpoolReader(folder)
    with names.segment(folder, 1).open("ab", buffering=0) as file:
        file.write(frame[:5])
        assert read(reader, 1) == [1, 2]
        assert read(reader, 3) == []
        file.write(frame[5:])
    assert read(reader, 3) == [3]


def test_only_wholly_acknowledged_segments_go_and_never_the_newest(folder: Path) -> None:
    filled(folder, 50)
    firsts = [number for number, _ in names.segments(folder)]
    reader = SpoolReader(folder)
    reader.delete_through(firsts[1] - 2)
    assert [number for number, _ in names.segments(folder)] == firsts
    reader.delete_through(firsts[1] - 1)
    assert [number for number, _ in names.segments(folder)] == firsts[1:]
    reader.delete_through(50)
    assert [number for number, _ in names.segments(folder)] == firsts[-1:]
    assert read(reader, 1) == list(range(firsts[-1], 51))


def test_bodies_are_found_while_they_are_added(folder: Path) -> None:
    spool = filled(folder, 1)
    reader = SpoolReader(folder)
    for number in range(20):
        key = spool.define(ingest_pb2.DEFINITION_KIND_PATTERN, bytes([number]) * 100)
        found = reader.definition(key)
        assert found is not None
        assert found.content == bytes([number]) * 100


@pytest.mark.parametrize("content", [b"\xff\xff\xff", b"\x0a\xff"])
def test_a_damaged_hello_is_named(folder: Path, content: bytes) -> None:
    filled(folder, 1)
    (folder / names.HELLO).write_bytes(content)
    with pytest.raises(SpoolError, match=r"hello\.binpb is damaged"):
        SpoolReader(folder)


def test_damaged_bodies_and_frames_are_named(folder: Path) -> None:
    filled(folder, 1)
    (folder / names.DEFINITIONS).write_bytes(b"\xff" * 20)
    names.segment(folder, 1).write_bytes(b"\xff" * 20)
    with pytest.raises(SpoolError, match=r"definitions\.spool is damaged"):
        SpoolReader(folder).definition(bytes(16))
    with pytest.raises(SpoolError, match=r"frames-00000001\.spool is damaged"):
        read(SpoolReader(folder), 1)


def test_a_folder_without_a_hello_is_no_spool(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="is no rank's spool: it holds no hello"):
        SpoolReader(tmp_path)


def test_one_sender_at_a_time(folder: Path) -> None:
    filled(folder, 1)
    first, second = SpoolReader(folder), SpoolReader(folder)
    assert first.lock()
    assert not second.lock()


def test_deleting_the_last_rank_deletes_the_run(folder: Path) -> None:
    filled(folder, 1)
    filled(folder.parent / "0-1", 1)
    SpoolReader(folder).delete()
    assert [path.name for path in folder.parent.iterdir()] == ["0-1"]
    SpoolReader(folder.parent / "0-1").delete()
    assert not folder.parent.exists()
    assert folder.parent.parent.is_dir()


def test_a_process_that_took_over_the_id_is_not_taken_for_the_rank(folder: Path) -> None:
    filled(folder, 1)
    assert not SpoolReader(folder).process.ended()
    kept = (folder / names.PROCESS).read_text().split()
    (folder / names.PROCESS).write_text(" ".join([kept[0], str(int(kept[1]) - 1), *kept[2:]]))
    assert SpoolReader(folder).process.ended()
