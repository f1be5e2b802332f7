"""Streams over real gRPC on loopback into a real SQLite file."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.agents import Agent
from tests.contract.samples import key, run_id
from tests.contract.wire_samples import (
    L,
    M,
    P,
    S,
    facts,
    frames,
    goodbye,
    hello,
    pattern,
    progress,
    shapes,
    step_range,
)

from commwatch.service.ingest.server import IngestServer, Limits
from commwatch.service.ingest.writer import Writer
from commwatch.service.store.contract import Store, StreamWrite
from commwatch.service.store.opening import open_store
from commwatch.v1 import ingest_pb2, records_pb2

ALL = ingest_pb2.DefinitionBatch(definitions=[P, S, L, M])


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.progressed: list[str] = []

    def run_changed(self, run_id: str) -> None:
        self.changed.append(run_id)

    def run_progressed(self, run_id: str) -> None:
        self.progressed.append(run_id)


@dataclasses.dataclass
class Service:
    port: int
    store: Store
    heard: Heard
    writer: Writer


@asynccontextmanager
async def serving(path: Path, *, queue_limit: int = 64, limits: Limits | None = None) -> AsyncIterator[Service]:
    store = open_store(f"sqlite:///{path / 'commwatch.db'}", migrate=True)
    heard = Heard()
    writer = Writer(store, queue_limit=queue_limit, clock=lambda: 1_800_000_000_000_000_000, listener=heard)
    with ThreadPoolExecutor(2) as readers:
        server = IngestServer(store, writer, readers, limits or Limits())
        port = await server.start("127.0.0.1:0")
        try:
            yield Service(port, store, heard, writer)
        finally:
            await server.stop(0)
            await writer.close()
    store.close()


Body = Callable[[Service], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Body], None]:
    def run_body(body: Body, limits: Limits | None = None) -> None:
        async def main() -> None:
            async with serving(tmp_path, limits=limits) as service:
                await body(service)

        asyncio.run(main())

    return run_body


Run = Callable[..., None]


def ack(number: int, *, goodbye: bool = False) -> ingest_pb2.Ack:
    return ingest_pb2.Ack(acked_frame=number, goodbye=goodbye)


def want(*definitions: ingest_pb2.Definition) -> ingest_pb2.Want:
    return ingest_pb2.Want(hashes=[item.hash for item in definitions])


def test_a_rank_reports_from_hello_to_goodbye(run: Run) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            assert await agent.hello() == 0
            await agent.send(frames=frames(facts(), step_range(1, 1, 10)))
            assert await agent.receive() == want(M, P, S, L)
            await agent.send(definitions=ALL)
            await agent.send(frames=frames(facts(), step_range(1, 1, 10)))
            assert await agent.receive() == ack(2)
            await agent.send(heartbeat=ingest_pb2.Heartbeat(progress=progress(1, 30, 30, 30)))
            await agent.send(frames=frames(step_range(2, 31, 31), first=3))
            assert await agent.receive() == ack(3)
            await agent.send(goodbye=goodbye(last=progress(2, 35, 5, 35)))
            assert await agent.receive() == ack(3, goodbye=True)
            assert await agent.end() == ("OK", "")
        found = service.store.run(run_id(1))
        assert found is not None
        assert (found.state, found.steps, found.calls, found.commit_subject) == ("complete", 35, 105, "Seven")
        (ranges,) = service.store.ranges(run_id(1))
        assert [(item.first_step, item.last_step, item.steps) for item in ranges.ranges] == [(1, 30, 30), (31, 35, 5)]
        assert set(service.heard.changed) == {run_id(1)}
        assert service.heard.progressed == [run_id(1)]

    run(body)


def test_resume_goes_on_after_the_last_frame_and_resends_are_acked_again(run: Run) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(definitions=ALL)
            await agent.send(frames=frames(facts(), step_range(1, 1, 10)))
            assert await agent.receive() == ack(2)
        async with Agent(service.port) as agent:
            assert await agent.hello() == 2
            await agent.send(frames=frames(facts(), step_range(1, 1, 10)))
            assert await agent.receive() == ack(2)
            # Half known, half new.
            await agent.send(frames=frames(step_range(1, 1, 10), step_range(2, 11, 12), first=2))
            assert await agent.receive() == ack(3)
        assert service.store.ranks(run_id(1))[0].stored_steps == 12

    run(body)


def test_frames_behind_a_gap_are_dropped_until_the_missing_one_comes(run: Run) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(definitions=ALL)
            await agent.send(frames=frames(step_range(3, 3, 3), first=3))
            await agent.send(goodbye=goodbye())
            await agent.send(frames=frames(step_range(1), step_range(2, 2, 2)))
            # No answer to the frame behind the gap, nor to the goodbye after it.
            assert await agent.receive() == ack(2)
            await agent.send(frames=frames(step_range(3, 3, 3), first=3))
            assert await agent.receive() == ack(3)
            await agent.send(goodbye=goodbye())
            assert await agent.receive() == ack(3, goodbye=True)
        assert service.store.ranks(run_id(1))[0].stored_steps == 3

    run(body)


def test_what_comes_before_an_unknown_hash_is_stored_and_the_rest_comes_again(run: Run) -> None:
    other = pattern("layers.1.wq")

    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(definitions=ALL)
            strange = step_range(2, 2, 2, pattern_hash=other.hash, shapes_hash=shapes(other).hash, lines_hash=b"")
            batch = frames(step_range(1), strange, step_range(3, 3, 3))
            await agent.send(frames=batch)
            assert await agent.receive() == ack(1)
            assert await agent.receive() == want(other, shapes(other))
            # Shapes before their pattern: they are wanted once more, and then fit.
            await agent.send(definitions=ingest_pb2.DefinitionBatch(definitions=[shapes(other)]))
            await agent.send(definitions=ingest_pb2.DefinitionBatch(definitions=[other]))
            await agent.send(frames=batch)
            assert await agent.receive() == want(shapes(other))
            await agent.send(definitions=ingest_pb2.DefinitionBatch(definitions=[shapes(other)]))
            await agent.send(frames=batch)
            assert await agent.receive() == ack(3)

    run(body)


def test_a_malformed_frame_is_counted_and_the_stream_goes_on(run: Run) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(definitions=ALL)
            batch = frames(step_range(1), step_range(2, 9, 3), step_range(3, 3, 3))
            batch.frames.add(number=4)
            await agent.send(frames=batch)
            reasons = [
                "a range goes from step 9 to 3",
                "the frame holds neither a range nor facts that this release knows",
            ]
            assert await agent.receive() == ingest_pb2.Rejected(frame=2, reason=reasons[0])
            assert await agent.receive() == ingest_pb2.Rejected(frame=4, reason=reasons[1])
            assert await agent.receive() == ack(4)
        (rank,) = service.store.ranks(run_id(1))
        assert (rank.acked_frame, rank.rejected_frames, rank.stored_steps) == (4, 2, 2)

    run(body)


def test_an_oversized_frame_is_rejected_alone(run: Run) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(definitions=ALL)
            large = step_range(1, shapes_hash=b"")
            large.statistics.extend(records_pb2.BytesStatistics(call=index, count=1) for index in range(12_000))
            await agent.send(frames=frames(large, step_range(2, 2, 2)))
            rejected = await agent.receive()
            assert isinstance(rejected, ingest_pb2.Rejected)
            assert rejected.frame == 1
            assert rejected.reason.endswith("bytes, more than 65536")
            assert await agent.receive() == ack(2)

    run(body, Limits(max_message_bytes=65_536))


def test_a_message_over_the_hard_limit_ends_only_its_stream(run: Run) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent, Agent(service.port) as bystander:
            await bystander.hello(2)
            await agent.hello()
            await agent.send_bytes(b"x" * 200_000)
            assert (await agent.status())[0] == "RESOURCE_EXHAUSTED"
            await bystander.send(goodbye=goodbye())
            assert await bystander.receive() == ack(0, goodbye=True)

    run(body, Limits(max_message_bytes=65_536))


def test_frames_of_a_malformed_definition_are_rejected_not_wanted_for_ever(run: Run) -> None:
    short = shapes(P, (0, 0))

    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(definitions=ALL)
            batch = frames(step_range(1, shapes_hash=short.hash), step_range(2, 2, 2))
            await agent.send(frames=batch)
            assert await agent.receive() == want(short)
            await agent.send(definitions=ingest_pb2.DefinitionBatch(definitions=[short]))
            reason = f"Shapes {short.hash.hex()} has 2 elements, its pattern 3"
            assert await agent.receive() == ingest_pb2.Rejected(hash=short.hash, reason=reason)
            await agent.send(frames=batch)
            assert await agent.receive() == ingest_pb2.Rejected(frame=1, reason=reason)
            assert await agent.receive() == ack(2)

    run(body)


def test_a_definition_must_have_the_hash_of_its_content(run: Run) -> None:
    forged = ingest_pb2.Definition(kind=P.kind, hash=P.hash, content=pattern("evil").content)

    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(definitions=ingest_pb2.DefinitionBatch(definitions=[forged]))
            rejected = await agent.receive()
            assert isinstance(rejected, ingest_pb2.Rejected)
            assert rejected.hash == P.hash
            assert "has content whose hash is" in rejected.reason
        assert service.store.definitions("default", [P.hash.hex()]) == {}

    run(body)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (step_range(1, pattern_hash=S.hash), f"{S.hash.hex()} is not a Pattern"),
        (step_range(1, shapes_hash=L.hash), f"{L.hash.hex()} is not the Shapes of pattern {P.hash.hex()}"),
        (facts(modules_hash=P.hash), f"{P.hash.hex()} is not a Modules"),
    ],
)
def test_a_frame_must_fit_what_it_refers_to(run: Run, content: records_pb2.StepRange, reason: str) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(definitions=ALL)
            await agent.send(frames=frames(content))
            assert await agent.receive() == ingest_pb2.Rejected(frame=1, reason=reason)
            assert await agent.receive() == ack(1)

    run(body)


def test_a_second_stream_of_a_rank_takes_over(run: Run) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as older, Agent(service.port) as newer:
            await older.hello()
            await older.send(definitions=ALL)
            await older.send(frames=frames(step_range(1)))
            assert await older.receive() == ack(1)
            assert await newer.hello() == 1
            assert await older.status() == ("ABORTED", "a newer stream of this rank took over")
            await newer.send(frames=frames(step_range(2, 2, 2), first=2))
            assert await newer.receive() == ack(2)

    run(body)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"run_id": "nonsense"}, "hello: run_id is 'nonsense', not a UUID"),
        ({"world_size": 0}, "hello: rank is 0 of a world size of 0"),
        ({"reporting_ranks": 2}, "hello: reporting_ranks is 2 of a world size of 1"),
        ({"project": " "}, "hello: project is empty"),
        ({"workload": "x" * 300}, "hello: workload has 300 characters, more than 256"),
        ({"started_unix_ns": 2**63}, f"hello: started_unix_ns is {2**63}, more than {2**63 - 1}"),
        ({"hostname": "a\0b"}, "hello: hostname holds a NUL character"),
    ],
)
def test_a_malformed_hello_ends_the_stream_with_a_sentence(run: Run, fields: dict[str, object], sentence: str) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.send(hello=hello(**fields))  # type: ignore[arg-type]
            assert await agent.status() == ("INVALID_ARGUMENT", sentence)
        assert service.store.runs() == []

    run(body)


def test_a_stream_must_begin_with_its_one_hello(run: Run) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.send(frames=frames(step_range(1)))
            assert await agent.status() == ("INVALID_ARGUMENT", "the first message of a stream is not a hello")
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(hello=hello())
            assert await agent.status() == ("INVALID_ARGUMENT", "a second hello on one stream")
        async with Agent(service.port) as agent:
            await agent.send(hello=hello(2, project="other"))
            await agent.receive()
            async with Agent(service.port) as thief:
                await thief.send(hello=hello(2))
                reason = f"run {run_id(2)} belongs to another project than 'default'"
                assert await thief.status() == ("INVALID_ARGUMENT", reason)

    run(body)


def test_silence_ends_a_stream(run: Run) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            assert await agent.status() == ("DEADLINE_EXCEEDED", "nothing was sent for 0.2 s")

    run(body, Limits(silence_s=0.2))


def test_malformed_heartbeats_and_goodbyes_are_answered_and_the_stream_goes_on(run: Run) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(heartbeat=ingest_pb2.Heartbeat(progress=progress(1, 3, 9, 3)))
            reason = "heartbeat: the open range has 9 steps up to step 3"
            assert await agent.receive() == ingest_pb2.Rejected(reason=reason)
            await agent.send(goodbye=ingest_pb2.Goodbye())
            assert await agent.receive() == ingest_pb2.Rejected(reason="goodbye: the ending 0 is unknown")
            await agent.send(goodbye=goodbye(ingest_pb2.ENDING_LOST))
            assert await agent.receive() == ack(0, goodbye=True)
        assert service.store.ranks(run_id(1))[0].state == "lost"

    run(body)


def test_a_busy_database_backs_off_and_loses_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commwatch.service.store.database.BUSY_TIMEOUT_MS", 50)

    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(definitions=ALL)
            await agent.send(frames=frames(step_range(1)))
            assert await agent.receive() == ack(1)
            other = sqlite3.connect(tmp_path / "commwatch.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            await agent.send(frames=frames(step_range(2, 2, 2), first=2))
            back_off = await agent.receive()
            assert isinstance(back_off, ingest_pb2.BackOff)
            assert back_off.wait_ms == 250
            assert "database is locked" in back_off.reason
            assert service.writer.unavailable_at is not None
            async with Agent(service.port) as newcomer:
                await newcomer.send(hello=hello(2))
                code, details = await newcomer.status()
                assert code == "UNAVAILABLE"
                assert details.endswith("Nothing is lost: connect again later.")
            other.execute("ROLLBACK")
            other.close()
            await agent.send(frames=frames(step_range(2, 2, 2), step_range(3, 3, 3), first=2))
            assert await agent.receive() == ack(3)

    run(body, Limits(back_off_ms=250))


def test_many_ranks_at_once_are_all_stored(run: Run) -> None:
    ranks = 24

    async def report(port: int, rank: int) -> None:
        async with Agent(port) as agent:
            await agent.hello(1, 0, rank, ranks)
            await agent.send(definitions=ALL)
            for number in range(1, 11):
                await agent.send(frames=frames(step_range(number, number, number), first=number))
                assert await agent.receive() == ack(number)
            await agent.send(goodbye=goodbye(last=progress(10, 10, 1, 10)))
            assert await agent.receive() == ack(10, goodbye=True)

    async def body(service: Service) -> None:
        await asyncio.gather(*(report(service.port, rank) for rank in range(ranks)))
        found = service.store.run(run_id(1))
        assert found is not None
        assert (found.state, found.steps, found.calls) == ("complete", 10, 30 * ranks)
        assert [rank.stored_steps for rank in service.store.ranks(run_id(1))] == [10] * ranks

    run(body)


def test_one_broken_write_does_not_hurt_those_committed_with_it(run: Run) -> None:
    async def body(service: Service) -> None:

        async with Agent(service.port) as agent:
            await agent.hello()
            good = StreamWrite(key(), "default")
            bad = StreamWrite(key(77), "default")
            results = await asyncio.gather(
                *(service.writer.write(write) for write in (good, bad, good)), return_exceptions=True
            )
            assert [type(result) for result in results] == [type(None), ValueError, type(None)]

    run(body)


def test_health_is_served_for_the_whole_and_for_ingest(run: Run) -> None:
    async def body(service: Service) -> None:
        async with aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for name in ("", "commwatch.v1.IngestService"):
                response = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
                assert response.status == health_pb2.HealthCheckResponse.SERVING

    run(body)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.binary(max_size=200), min_size=1, max_size=12))
def test_random_bytes_never_end_the_server(tmp_path: Path, contents: list[bytes]) -> None:
    async def main() -> None:
        async with serving(tmp_path) as service:
            for content in contents:
                for greeted in (False, True):
                    async with Agent(service.port) as agent:
                        if greeted:
                            await agent.hello()
                        await agent.send_bytes(content)
                        code, details = await agent.end()
                        assert code in ("OK", "INVALID_ARGUMENT"), details
            async with Agent(service.port) as agent:
                await agent.hello()

    asyncio.run(main())
