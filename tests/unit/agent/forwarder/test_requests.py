"""Capture requests on their way from the service to the rank's page."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch.agent.forwarder.requests import MAX_WAITING, Requests
from commwatch.agent.spool.page import Numbers
from commwatch.agent.spool.reader import SpoolReader
from commwatch.agent.spool.writer import SpoolWriter
from commwatch.v1 import ingest_pb2, records_pb2


@pytest.fixture
def spool(tmp_path: Path) -> SpoolWriter:
    return SpoolWriter(tmp_path / "0-0", ingest_pb2.Hello(run_id="r", world_size=1), 64 * 1024)


def ask(requests: Requests, number: int, steps: int) -> None:
    requests.take(ingest_pb2.CaptureRequest(number=number, steps=steps))


def test_requests_reach_the_rank_one_after_the_other(spool: SpoolWriter) -> None:
    reader, requests = SpoolReader(spool.folder), Requests()
    assert spool.requested() == (0, 0)
    ask(requests, 3, 2)
    ask(requests, 5, 1)
    ask(requests, 3, 9)  # the same again
    requests.pass_on(reader, reader.counters())
    assert spool.requested() == (3, 2)
    requests.pass_on(reader, reader.counters())
    assert spool.requested() == (3, 2)
    spool.publish(Numbers(request=3))
    requests.pass_on(reader, reader.counters())
    assert spool.requested() == (5, 1)


def test_a_new_stream_does_not_repeat_what_the_rank_took_up(spool: SpoolWriter) -> None:
    reader = SpoolReader(spool.folder)
    spool.publish(Numbers(request=4))
    requests = Requests()
    ask(requests, 4, 1)
    requests.pass_on(reader, reader.counters())
    assert spool.requested() == (0, 0)


@pytest.mark.parametrize(("number", "steps"), [(0, 1), (1, 0), (1, 1001), (2**48, 1)])
def test_a_request_that_makes_no_sense_is_ignored(spool: SpoolWriter, number: int, steps: int) -> None:
    reader, requests = SpoolReader(spool.folder), Requests()
    ask(requests, number, steps)
    requests.pass_on(reader, reader.counters())
    assert spool.requested() == (0, 0)


def test_requests_are_bounded(spool: SpoolWriter) -> None:
    reader, requests = SpoolReader(spool.folder), Requests()
    for number in range(1, MAX_WAITING + 10):
        ask(requests, number, 1)
    taken = []
    for _ in range(MAX_WAITING + 10):
        requests.pass_on(reader, reader.counters())
        taken.append(spool.requested()[0])
        spool.publish(Numbers(request=taken[-1]))
    assert max(taken) == MAX_WAITING


def test_counters_and_the_request_do_not_disturb_each_other(spool: SpoolWriter) -> None:
    reader = SpoolReader(spool.folder)
    spool.publish(Numbers(steps=7, calls=21))
    reader.request_capture(2**48 - 1, 1000)
    assert (reader.counters().steps, reader.counters().calls) == (7, 21)
    spool.publish(Numbers(steps=8, calls=24))
    assert spool.requested() == (2**48 - 1, 1000)


def test_captures_leave_half_of_the_spool_to_steps(spool: SpoolWriter) -> None:
    def capture() -> records_pb2.Capture:
        call = records_pb2.CapturedCall(kind=records_pb2.CAPTURED_KIND_OP, name="x" * 4_000)
        return records_pb2.Capture(step=1, part=1, calls=[call], records=[records_pb2.CapturedRecord()])

    kept = 0
    while spool.append(capture()):
        kept += 1
    assert kept == 8  # of 64 KiB
    assert spool.append(records_pb2.Capture(step=1, part=2, last_part=True, reason="no room"))
    assert spool.append(records_pb2.StepRange(number=1, first_step=1, last_step=1, steps=1))
    assert spool.reason == ""
