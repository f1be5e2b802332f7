"""Streams over real gRPC on loopback into a real SQLite file."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from commwatch.service.ingest.server import Limits
from commwatch.service.store.contract import StreamWrite
from commwatch.v1 import ingest_pb2
from tests.contract.agents import Agent
from tests.contract.samples import key, run_id
from tests.contract.serving import ALL, Service, ack, run, want
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


def test_a_rank_reports_from_hello_to_goodbye(tmp_path: Path) -> None:
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

    run(tmp_path, body)


def test_resume_goes_on_after_the_last_frame_and_resends_are_acked_again(tmp_path: Path) -> None:
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

    run(tmp_path, body)


def test_frames_behind_a_gap_are_dropped_until_the_missing_one_comes(tmp_path: Path) -> None:
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

    run(tmp_path, body)


def test_what_comes_before_an_unknown_hash_is_stored_and_the_rest_comes_again(tmp_path: Path) -> None:
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

    run(tmp_path, body)


def test_a_second_stream_of_a_rank_takes_over(tmp_path: Path) -> None:
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

    run(tmp_path, body)


def test_a_busy_database_backs_off_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    run(tmp_path, body, Limits(back_off_ms=250))


def test_many_ranks_at_once_are_all_stored(tmp_path: Path) -> None:
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

    run(tmp_path, body)


def test_one_broken_write_does_not_hurt_those_committed_with_it(tmp_path: Path) -> None:
    async def body(service: Service) -> None:

        async with Agent(service.port) as agent:
            await agent.hello()
            good = StreamWrite(key(), "default")
            bad = StreamWrite(key(77), "default")
            results = await asyncio.gather(
                *(service.writer.write(write) for write in (good, bad, good)), return_exceptions=True
            )
            assert [type(result) for result in results] == [type(None), ValueError, type(None)]

    run(tmp_path, body)


def test_health_is_served_for_the_whole_and_for_ingest(tmp_path: Path) -> None:
    async def body(service: Service) -> None:
        async with aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for name in ("", "commwatch.v1.IngestService"):
                response = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
                assert response.status == health_pb2.HealthCheckResponse.SERVING

    run(tmp_path, body)
