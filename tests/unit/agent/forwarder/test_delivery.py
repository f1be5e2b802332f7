from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from commwatch.agent.forwarder.delivery import DeadlineError, Waits
from commwatch.agent.forwarder.stream import Limits, UndeliverableError
from commwatch.agent.spool import names
from commwatch.agent.spool.writer import SpoolWriter
from commwatch.v1 import ingest_pb2, records_pb2
from tests.contract.wire_samples import L, P, S, hello
from tests.integration.live_service import free_port
from tests.unit.agent.forwarder.small_service import (
    SPEEDY,
    Answer,
    SmallService,
    ack,
    back_off,
    delivery,
    serving,
    until,
    welcome,
)
from tests.unit.agent.forwarder.spools import make_spool, write_ranges

LIMIT_S = 20.0
WANT_PATTERN = ingest_pb2.ReportResponse(want=ingest_pb2.Want(hashes=[P.hash]))
ONE_BY_ONE = Limits(batch_frames=1)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), LIMIT_S))


def deliver(folder: Path, service: SmallService, limits: Limits = ONE_BY_ONE) -> None:
    async def body() -> None:
        async with serving(service) as endpoint:
            await delivery(folder, endpoint, limits=limits).run()

    run(body)


def numbers(service: SmallService) -> list[int]:
    return [frame.number for frame in service.frames]


def once(kind: str, answer: Answer, *, skip: int = 0) -> Callable[[int, ingest_pb2.ReportRequest], Answer]:
    """Interfere with one message of a kind: the first, or the one after ``skip`` others."""
    left = [skip]

    def interfere(_stream: int, message: ingest_pb2.ReportRequest) -> Answer:
        if message.WhichOneof("message") != kind:
            return None
        left[0] -= 1
        return answer if left[0] == -1 else None

    return interfere


@pytest.mark.parametrize("limits", [ONE_BY_ONE, Limits(), Limits(batch_frames=2, window_frames=3)])
def test_everything_arrives_once_in_order_and_the_goodbye_last(tmp_path: Path, limits: Limits) -> None:
    service = SmallService()
    deliver(make_spool(tmp_path, 10), service, limits)
    assert numbers(service) == list(range(1, 11))
    (goodbye,) = service.goodbyes
    assert (goodbye.ending, goodbye.progress.steps, goodbye.progress.calls) == (ingest_pb2.ENDING_CLEAN, 10, 30)
    assert service.streams == 1


@pytest.mark.parametrize(
    ("ending", "detail", "sent", "said"),
    [
        ("clean", "", ingest_pb2.ENDING_CLEAN, ""),
        ("exception", "RuntimeError", ingest_pb2.ENDING_EXCEPTION, "RuntimeError"),
        ("", "", ingest_pb2.ENDING_LOST, "the process ended without a goodbye"),
    ],
)
def test_the_goodbye_says_how_the_rank_ended(
    tmp_path: Path, ending: str, detail: str, sent: ingest_pb2.Ending.ValueType, said: str
) -> None:
    service = SmallService()
    deliver(make_spool(tmp_path, 1, ending=ending, detail=detail), service)
    assert [(goodbye.ending, goodbye.detail) for goodbye in service.goodbyes] == [(sent, said)]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL])
@pytest.mark.parametrize(
    ("kind", "skip"), [("hello", 0), ("frames", 0), ("frames", 2), ("definitions", 0), ("goodbye", 0)]
)
def test_a_stream_that_is_cut_is_taken_up_where_it_was(
    tmp_path: Path, code: grpc.StatusCode, kind: str, skip: int
) -> None:
    service = SmallService(once(kind, code, skip=skip))
    deliver(make_spool(tmp_path, 5), service)
    assert numbers(service) == [1, 2, 3, 4, 5]
    assert (service.streams, len(service.goodbyes)) == (2, 1)


@pytest.mark.parametrize("wait_ms", [0, 30])
@pytest.mark.parametrize(("kind", "skip"), [("frames", 0), ("frames", 3), ("definitions", 0), ("goodbye", 0)])
def test_after_back_off_everything_comes_again_on_the_same_stream(
    tmp_path: Path, kind: str, skip: int, wait_ms: int
) -> None:
    service = SmallService(once(kind, back_off(wait_ms), skip=skip))
    deliver(make_spool(tmp_path, 5), service)
    assert numbers(service) == [1, 2, 3, 4, 5]
    assert (service.streams, len(service.goodbyes)) == (1, 1)


def test_bodies_are_sent_when_they_are_wanted_and_patterns_first(tmp_path: Path) -> None:
    service = SmallService()
    deliver(make_spool(tmp_path, 3), service)
    assert service.kinds_defined == [P.kind, S.kind, L.kind]
    again = SmallService()
    again.bodies = dict(service.bodies)
    deliver(make_spool(tmp_path, 3, run=2), again)
    assert again.kinds_defined == []


def test_a_want_takes_the_goodbye_back_until_everything_is_acknowledged(tmp_path: Path) -> None:
    service = SmallService(once("goodbye", WANT_PATTERN))
    deliver(make_spool(tmp_path, 3), service)
    assert (numbers(service), len(service.goodbyes), service.streams) == ([1, 2, 3], 1, 1)


def test_a_body_the_spool_lost_is_sent_empty_and_its_frames_are_rejected(tmp_path: Path) -> None:
    folder = make_spool(tmp_path, 3)
    (folder / names.DEFINITIONS).write_bytes(b"")
    service = SmallService()
    deliver(folder, service)
    assert (service.rejected, numbers(service), len(service.goodbyes)) == ([1, 2, 3], [], 1)


def test_a_frame_over_the_limit_is_sent_empty_and_the_others_whole(tmp_path: Path) -> None:
    spool = SpoolWriter(tmp_path / "run" / "0-0", hello(pid=os.getpid()), 1 << 24)
    write_ranges(spool, 1)
    write_ranges(spool, 1, first=2, padding=200_000)
    write_ranges(spool, 1, first=3)
    spool.close("clean", "")
    service = SmallService()
    service.max_message_bytes = 100_000
    deliver(spool.folder, service, Limits())
    assert (service.rejected, numbers(service)) == ([2], [1, 3])


def test_a_refused_rank_is_not_tried_again(tmp_path: Path) -> None:
    service = SmallService(once("hello", grpc.StatusCode.INVALID_ARGUMENT))
    folder = make_spool(tmp_path, 5)
    with pytest.raises(UndeliverableError, match=r"127\.0\.0\.1:\d+: refused this rank: the test says so"):
        deliver(folder, service)
    assert service.streams == 1
    assert folder.is_dir()


def test_a_refusal_in_the_middle_ends_it_too(tmp_path: Path) -> None:
    """gRPC hides the status when a write fails at that moment: then the next stream shows it."""

    def interfere(_stream: int, message: ingest_pb2.ReportRequest) -> Answer:
        third = [frame.number for frame in message.frames.frames] == [3]
        return grpc.StatusCode.INVALID_ARGUMENT if third and service.cursor == 2 else None

    service = SmallService(interfere)
    with pytest.raises(UndeliverableError, match="refused this rank: the test says so"):
        deliver(make_spool(tmp_path, 3), service)
    assert numbers(service) == [1, 2]


def test_answers_that_come_twice_change_nothing(tmp_path: Path) -> None:
    def twice(stream: int, message: ingest_pb2.ReportRequest) -> Answer:
        return ack(0) if message.WhichOneof("message") == "heartbeat" else None

    service = SmallService(twice)
    deliver(make_spool(tmp_path, 5), service)
    assert numbers(service) == [1, 2, 3, 4, 5]


def test_an_acknowledgement_of_what_was_not_sent_deletes_nothing(tmp_path: Path) -> None:
    service = SmallService(once("frames", ack(99)))
    deliver(make_spool(tmp_path, 5), service)
    assert (numbers(service), service.streams) == ([1, 2, 3, 4, 5], 2)


def test_frames_of_another_launch_are_not_taken_for_this_spools(tmp_path: Path) -> None:
    service = SmallService(once("hello", welcome(4)))
    with pytest.raises(UndeliverableError, match=r"holds 4 frames of this rank.*same COMMWATCH_RUN_ID"):
        deliver(make_spool(tmp_path, 3), service)
    assert service.frames == []


def test_a_service_that_forgot_gets_empty_frames_for_what_was_deleted(tmp_path: Path) -> None:
    folder = make_spool(tmp_path, 3)
    names.segment(folder, 1).rename(names.segment(folder, 4))
    content = b"".join(
        bytes([len(frame)]) + frame
        for frame in (
            ingest_pb2.Frame(number=n, facts=records_pb2.Facts(backend="gloo")).SerializeToString() for n in (4, 5)
        )
    )
    names.segment(folder, 4).write_bytes(content)
    service = SmallService()
    deliver(folder, service)
    assert (service.rejected, numbers(service), len(service.goodbyes)) == ([1, 2, 3], [4, 5], 1)


def test_a_service_that_comes_back_on_its_port_gets_the_rest(tmp_path: Path) -> None:
    folder = make_spool(tmp_path, 5)
    service = SmallService()
    port = free_port()

    async def body() -> None:
        third = asyncio.Event()
        loop = asyncio.get_running_loop()

        def interfere(_stream: int, message: ingest_pb2.ReportRequest) -> Answer:
            if [frame.number for frame in message.frames.frames] == [3] and not third.is_set():
                loop.call_soon(third.set)
                return "ignore"
            return None

        service.interfere = interfere
        sender = asyncio.ensure_future(delivery(folder, f"127.0.0.1:{port}", limits=ONE_BY_ONE).run())
        service.bodies = {body.hash: body for body in (P, S, L)}
        async with serving(service, port):
            await third.wait()
        assert service.cursor == 2
        async with serving(service, port):
            await sender

    run(body)
    assert (numbers(service), len(service.goodbyes)) == ([1, 2, 3, 4, 5], 1)


def test_counters_are_sent_behind_the_frames_they_count(tmp_path: Path) -> None:
    spool = SpoolWriter(tmp_path / "run" / "0-0", hello(pid=os.getpid()), 1 << 22)
    service = SmallService()
    gone: list[bool] = []

    async def body() -> None:
        async with serving(service) as endpoint:
            sender = asyncio.ensure_future(delivery(spool.folder, endpoint, ended=lambda: bool(gone)).run())
            for first in (1, 3, 5):
                write_ranges(spool, 2, first=first)
                steps = first + 1
                await until(lambda: any(beat.steps == steps for _, beat in service.heartbeats))  # noqa: B023  awaited here
            spool.close("clean", "")
            gone.append(True)
            await sender

    run(body)
    assert numbers(service) == [1, 2, 3, 4, 5, 6]
    settled = [(cursor, progress) for cursor, progress in service.heartbeats if cursor]
    assert all(progress.range <= cursor for cursor, progress in settled)


def test_what_is_acknowledged_is_deleted_while_the_rank_runs(tmp_path: Path) -> None:
    spool = SpoolWriter(tmp_path / "run" / "0-0", hello(pid=os.getpid()), 64 * 1024)
    service = SmallService()

    async def body() -> None:
        async with serving(service) as endpoint:
            sender = asyncio.ensure_future(delivery(spool.folder, endpoint, ended=lambda: False).run())
            for first in range(1, 2001, 100):  # four times what the spool may hold
                write_ranges(spool, 100, first=first)
                last = first + 99
                await until(lambda: service.cursor == last and len(names.segments(spool.folder)) <= 2)  # noqa: B023  awaited here
            sender.cancel()

    run(body)
    assert (service.cursor, spool.dropped_frames, spool.reason) == (2000, 0, "")


class TestDeadlines:
    """Whatever a delivery waits for, it ends at its deadline."""

    WAITS = Waits(deadline=0.3, heartbeat=0.02, dial=0.0, first=0.01, longest=0.05)

    def expect(self, folder: Path, endpoint: str, waits: Waits = WAITS) -> Awaitable[None]:
        async def body() -> None:
            began = time.monotonic()
            with pytest.raises(DeadlineError, match=r"did not take everything within 0\.3 s"):
                await delivery(folder, endpoint, waits=waits).run()
            assert 0.3 <= time.monotonic() - began < 3

        return body()

    def test_nobody_listens(self, tmp_path: Path) -> None:
        folder, port = make_spool(tmp_path), free_port()
        run(lambda: self.expect(folder, f"127.0.0.1:{port}"))

    def test_a_connection_that_nobody_accepts(self, tmp_path: Path) -> None:
        folder = make_spool(tmp_path)

        async def body() -> None:
            silent = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
            async with silent:
                await self.expect(folder, f"127.0.0.1:{silent.sockets[0].getsockname()[1]}")

        run(body)

    def test_the_jitter_before_the_first_dial(self, tmp_path: Path) -> None:
        folder, port = make_spool(tmp_path), free_port()
        waits = Waits(deadline=0.3, heartbeat=0.02, dial=1e6)
        run(lambda: self.expect(folder, f"127.0.0.1:{port}", waits))

    @pytest.mark.parametrize("ignored", ["hello", "frames", "definitions", "goodbye"])
    def test_a_service_that_does_not_answer(self, tmp_path: Path, ignored: str) -> None:
        folder = make_spool(tmp_path)
        service = SmallService(lambda _, message: "ignore" if message.WhichOneof("message") == ignored else None)

        async def body() -> None:
            async with serving(service) as endpoint:
                await self.expect(folder, endpoint)

        run(body)

    @pytest.mark.parametrize("answer", [back_off(60_000), WANT_PATTERN])
    def test_a_service_that_always_wants_something(self, tmp_path: Path, answer: ingest_pb2.ReportResponse) -> None:
        folder = make_spool(tmp_path)
        service = SmallService(lambda _, message: answer if message.WhichOneof("message") == "frames" else None)

        async def body() -> None:
            async with serving(service) as endpoint:
                await self.expect(folder, endpoint)

        run(body)
        assert len(service.kinds_defined) < 20

    def test_a_running_rank_has_none_and_somebody_may_be_in_a_hurry(self, tmp_path: Path) -> None:
        folder = make_spool(tmp_path)
        waits = Waits(deadline=1000.0, heartbeat=0.02, dial=0.0)
        gone: list[bool] = []

        async def body() -> None:
            sender = delivery(folder, f"127.0.0.1:{free_port()}", ended=lambda: bool(gone), waits=waits)
            sender.hasten(0.1)
            running = asyncio.ensure_future(sender.run())
            done, _ = await asyncio.wait({running}, timeout=0.5)
            assert not done
            gone.append(True)
            with pytest.raises(DeadlineError, match=r"within 0\.1 s"):
                await running

        run(body)


@pytest.mark.parametrize("ignored", ["hello", "frames", "goodbye"])
def test_a_stream_without_answers_is_given_up_for_another(tmp_path: Path, ignored: str) -> None:
    def interfere(stream: int, message: ingest_pb2.ReportRequest) -> Answer:
        return "ignore" if stream == 1 and message.WhichOneof("message") == ignored else None

    service = SmallService(interfere)
    deliver(make_spool(tmp_path, 5), service, Limits(answer_s=0.2, batch_frames=1))
    assert (numbers(service), service.streams, len(service.goodbyes)) == ([1, 2, 3, 4, 5], 2, 1)


def test_silence_is_no_fault_while_nothing_is_owed(tmp_path: Path) -> None:
    spool = SpoolWriter(tmp_path / "run" / "0-0", hello(pid=os.getpid()), 1 << 22)
    write_ranges(spool, 1)
    service = SmallService()
    gone: list[bool] = []

    async def body() -> None:
        async with serving(service) as endpoint:
            running = delivery(
                spool.folder, endpoint, ended=lambda: bool(gone), waits=SPEEDY, limits=Limits(answer_s=0.2)
            ).run()
            sender = asyncio.ensure_future(running)
            await until(lambda: len(service.heartbeats) >= 15)
            gone.append(True)
            await sender

    run(body)
    assert service.streams == 1
