"""The forwarder process between a real spool and a service that breaks in every way the protocol knows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from commwatch.agent.spool import names
from commwatch.v1 import ingest_pb2
from tests.integration.frame_service import CutError, FrameService
from tests.integration.live_service import LiveService, free_port, until
from tests.integration.spooling_rank import LIMIT_S, RUN_ID, SpoolingRank, forwarder, upload

Request = ingest_pb2.ReportRequest
Response = ingest_pb2.ReportResponse


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
def rank(stack: ExitStack, tmp_path: Path) -> SpoolingRank:
    started = SpoolingRank(tmp_path / "spool")
    stack.callback(started.stop)
    return started


def test_frames_then_counters_then_goodbye_and_nothing_is_left(keeping: FrameService, rank: SpoolingRank) -> None:
    process = forwarder(rank.folder, keeping.endpoint)
    rank.tell("append 500")
    keeping.until(lambda kept: len(kept.frames) == 500 and (500, 500) in kept.beats)
    rank.tell("append 20")
    rank.end()
    assert process.wait(LIMIT_S) == 0
    kept = keeping.kept
    assert keeping.numbers() == list(range(1, 521))
    assert [(said.ending, said.detail, said.progress.steps) for said in kept.goodbyes] == [
        (ingest_pb2.ENDING_CLEAN, "", 520)
    ]
    assert (len(kept.hellos), kept.hellos[0].run_id, kept.wants) == (1, RUN_ID, 1)
    assert all(newest >= steps for newest, steps in kept.beats), "a heartbeat overtook frames"
    assert not rank.folder.parent.exists()


def test_an_exception_is_named(keeping: FrameService, rank: SpoolingRank) -> None:
    process = forwarder(rank.folder, keeping.endpoint)
    rank.end("exception,ValueError")
    assert process.wait(LIMIT_S) == 0
    (said,) = keeping.kept.goodbyes
    assert (said.ending, said.detail) == (ingest_pb2.ENDING_EXCEPTION, "ValueError")


def test_a_killed_rank_is_lost_and_its_frames_are_not(keeping: FrameService, rank: SpoolingRank) -> None:
    process = forwarder(rank.folder, keeping.endpoint)
    rank.tell("append 300")
    rank.kill()
    assert process.wait(LIMIT_S) == 0
    assert keeping.numbers() == list(range(1, 301))
    (said,) = keeping.kept.goodbyes
    assert (said.ending, said.progress.steps) == (ingest_pb2.ENDING_LOST, 300)
    assert "without a goodbye" in said.detail


def test_the_forwarder_outlives_the_process_group_of_its_rank(
    keeping: FrameService, stack: ExitStack, tmp_path: Path
) -> None:
    variables = {"COMMWATCH_ENDPOINT": keeping.endpoint, "COMMWATCH_HEARTBEAT_S": "0.05"}
    rank = SpoolingRank(tmp_path / "spool", variables=variables)
    stack.callback(rank.stop)
    rank.tell(f"forward {tmp_path}")
    keeping.until(lambda kept: len(kept.hellos) == 1)
    keeping.stop()
    rank.tell("append 100")
    children = Path(f"/proc/{rank.process.pid}/task/{rank.process.pid}/children").read_text()
    assert children.split() == [], "a program that waits for any child would find the forwarder"
    os.killpg(rank.process.pid, signal.SIGKILL)
    # Its output ends with it: nothing else holds the other end, or a launcher would wait.
    rank.process.communicate(timeout=LIMIT_S)
    keeping.start()
    keeping.until(lambda kept: len(kept.goodbyes) == 1)
    assert keeping.numbers() == list(range(1, 101))
    assert keeping.kept.goodbyes[0].ending == ingest_pb2.ENDING_LOST
    until(lambda: not rank.folder.exists())


def test_a_cut_stream_is_resumed_without_loss_or_double(keeping: FrameService, rank: SpoolingRank) -> None:
    cuts = [50, 300, 301, 900]

    def cut(request: Request) -> Response | None:
        numbers = [frame.number for frame in request.frames.frames]
        if cuts and numbers and numbers[-1] >= cuts[0]:
            cuts.pop(0)
            raise CutError
        return None

    rank.tell("append 1000")
    keeping.fault = cut
    process = forwarder(rank.folder, keeping.endpoint)
    rank.end()
    assert process.wait(LIMIT_S) == 0
    assert cuts == []
    assert keeping.numbers() == list(range(1, 1001))
    assert len(keeping.kept.goodbyes) == 1


@pytest.mark.parametrize("wait_ms", [0, 100])
def test_what_the_service_could_not_store_is_sent_again(
    keeping: FrameService, rank: SpoolingRank, wait_ms: int
) -> None:
    refused = {"frames": 3, "definitions": 2, "goodbye": 2}

    def refuse(request: Request) -> Response | None:
        kind = request.WhichOneof("message") or ""
        if not refused.get(kind):
            return None
        refused[kind] -= 1
        return Response(back_off=ingest_pb2.BackOff(wait_ms=wait_ms, reason="the database is busy"))

    keeping.fault = refuse
    rank.tell("append 600")
    process = forwarder(rank.folder, keeping.endpoint)
    rank.end()
    assert process.wait(LIMIT_S) == 0
    assert refused == {"frames": 0, "definitions": 0, "goodbye": 0}
    assert keeping.numbers() == list(range(1, 601))
    assert len(keeping.kept.goodbyes) == 1


def test_a_service_that_comes_back_goes_on_where_it_was(keeping: FrameService, rank: SpoolingRank) -> None:
    process = forwarder(rank.folder, keeping.endpoint)
    rank.tell("append 100")
    keeping.until(lambda kept: len(kept.frames) == 100)
    keeping.stop()
    rank.tell("append 100")
    keeping.start()
    keeping.until(lambda kept: len(kept.frames) == 200)
    rank.end()
    assert process.wait(LIMIT_S) == 0
    assert keeping.numbers() == list(range(1, 201))


def test_a_service_that_forgot_everything_gets_what_is_left_and_counts_the_rest(
    keeping: FrameService, stack: ExitStack, tmp_path: Path
) -> None:
    """Its database was replaced: acknowledged segments are gone by then."""
    rank = SpoolingRank(tmp_path / "spool", max_bytes=64 * 1024)
    stack.callback(rank.stop)
    process = forwarder(rank.folder, keeping.endpoint)
    sent = 0
    while not names.segments(rank.folder) or names.segments(rank.folder)[0][0] == 1:
        rank.tell("append 100")
        sent += 100
        keeping.until(lambda kept, sent=sent: len(kept.frames) == sent)  # type: ignore[misc]
    keeping.stop()
    first_left = names.segments(rank.folder)[0][0]
    keeping.kept.frames.clear()
    keeping.start()
    rank.end()
    assert process.wait(LIMIT_S) == 0
    assert keeping.numbers() == list(range(1, sent + 1))
    empty = [frame.number for frame in keeping.kept.frames if frame.WhichOneof("content") is None]
    assert empty == list(range(1, first_left))


def test_a_service_that_is_there_late_gets_everything(stack: ExitStack, rank: SpoolingRank) -> None:
    service = FrameService()
    service.port = free_port()
    stack.callback(service.stop)
    process = forwarder(rank.folder, service.endpoint)
    rank.tell("append 10")
    until(lambda: (rank.folder / names.LOG).exists() and "broke" in (rank.folder / names.LOG).read_text())
    service.start()
    service.until(lambda kept: len(kept.frames) == 10)
    rank.end()
    assert process.wait(LIMIT_S) == 0
    assert len(service.kept.goodbyes) == 1


def test_at_the_deadline_the_spool_is_left_and_upload_delivers_it(rank: SpoolingRank, stack: ExitStack) -> None:
    rank.tell("append 40")
    process = forwarder(rank.folder, f"127.0.0.1:{free_port()}", COMMWATCH_DEADLINE_S="0.5")
    rank.kill()
    assert process.wait(LIMIT_S) == 3
    assert f"`commwatch upload {rank.folder}`" in (rank.folder / names.LOG).read_text()
    service = FrameService()
    service.start()
    stack.callback(service.stop)
    sent = upload(rank.folder.parent.parent, service.endpoint)
    assert (sent.returncode, sent.stdout) == (0, f"[1/1] {rank.folder}: sent\n")
    assert service.numbers() == list(range(1, 41))
    assert [said.ending for said in service.kept.goodbyes] == [ingest_pb2.ENDING_LOST]
    assert not rank.folder.exists()


def test_a_silent_service_does_not_hold_the_forwarder_past_its_deadline(
    keeping: FrameService, rank: SpoolingRank
) -> None:
    """It takes connections and messages and never answers: no wait may be longer than the deadline."""

    def swallow(request: Request) -> Response | None:
        request.ClearField(request.WhichOneof("message"))  # type: ignore[arg-type]
        return None

    keeping.fault = swallow
    process = forwarder(rank.folder, keeping.endpoint, COMMWATCH_DEADLINE_S="0.5")
    rank.kill()
    assert process.wait(15) == 3
    assert rank.folder.is_dir()


def test_upload_leaves_a_rank_that_runs_and_a_spool_that_cannot_be_sent(rank: SpoolingRank, tmp_path: Path) -> None:
    rank.tell("append 5")
    nobody = f"127.0.0.1:{free_port()}"
    skipped = upload(rank.folder, nobody)
    assert (skipped.returncode, skipped.stdout) == (0, f"[1/1] {rank.folder}: skipped, its rank still runs\n")
    rank.kill()
    left = upload(rank.folder, nobody, COMMWATCH_DEADLINE_S="0.5")
    assert left.returncode == 4
    assert left.stdout.startswith(f"[1/1] {rank.folder}: left: {nobody} ")
    assert rank.folder.is_dir()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_meant_for_the_job_do_not_end_it(
    keeping: FrameService, rank: SpoolingRank, number: signal.Signals
) -> None:
    process = forwarder(rank.folder, keeping.endpoint)
    keeping.until(lambda kept: len(kept.beats) >= 1)
    os.killpg(process.pid, number)
    rank.tell("append 30")
    keeping.until(lambda kept: len(kept.frames) == 30)
    rank.end()
    assert process.wait(LIMIT_S) == 0
    assert len(keeping.kept.goodbyes) == 1


def test_rank_zero_names_its_commit(keeping: FrameService, rank: SpoolingRank, tmp_path: Path) -> None:
    variables = {"COMMWATCH_PROGRAM_ROOT": str(tmp_path), "COMMWATCH_COMMIT": "abc123", "COMMWATCH_BRANCH": "topic"}
    process = forwarder(rank.folder, keeping.endpoint, **variables)
    rank.end()
    assert process.wait(LIMIT_S) == 0
    assert keeping.kept.hellos[0].commit == ingest_pb2.Commit(sha="abc123", branch="topic")


def test_a_real_service_stores_what_was_spooled(service: LiveService, rank: SpoolingRank) -> None:
    process = forwarder(rank.folder, service.endpoint)
    rank.tell("append 50")
    rank.end()
    assert process.wait(LIMIT_S) == 0
    assert service.only_run() == RUN_ID
    store = service.store()
    try:
        (stored,) = store.ranks(RUN_ID)
        assert (stored.steps, stored.stored_steps, stored.calls) == (50, 50, 50)
    finally:
        store.close()
