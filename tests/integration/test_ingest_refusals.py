"""What a stream may not send, and that the stream goes on where it can."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commwatch.service.ingest.server import Limits
from commwatch.v1 import ingest_pb2, records_pb2
from tests.contract.agents import Agent
from tests.contract.samples import run_id
from tests.contract.serving import ALL, Service, ack, run, serving, want
from tests.contract.wire_samples import (
    L,
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


def test_a_malformed_frame_is_counted_and_the_stream_goes_on(tmp_path: Path) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(definitions=ALL)
            batch = frames(step_range(1), step_range(2, 9, 3), step_range(3, 3, 3))
            batch.frames.add(number=4)
            await agent.send(frames=batch)
            reasons = [
                "a range goes from step 9 to 3",
                "the frame holds no record that this release knows",
            ]
            assert await agent.receive() == ingest_pb2.Rejected(frame=2, reason=reasons[0])
            assert await agent.receive() == ingest_pb2.Rejected(frame=4, reason=reasons[1])
            assert await agent.receive() == ack(4)
        (rank,) = service.store.ranks(run_id(1))
        assert (rank.acked_frame, rank.rejected_frames, rank.stored_steps) == (4, 2, 2)

    run(tmp_path, body)


def test_an_oversized_frame_is_rejected_alone(tmp_path: Path) -> None:
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

    run(tmp_path, body, Limits(max_message_bytes=65_536))


def test_a_message_over_the_hard_limit_ends_only_its_stream(tmp_path: Path) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent, Agent(service.port) as bystander:
            await bystander.hello(2)
            await agent.hello()
            await agent.send_bytes(b"x" * 200_000)
            assert (await agent.status())[0] == "RESOURCE_EXHAUSTED"
            await bystander.send(goodbye=goodbye())
            assert await bystander.receive() == ack(0, goodbye=True)

    run(tmp_path, body, Limits(max_message_bytes=65_536))


def test_frames_of_a_malformed_definition_are_rejected_not_wanted_for_ever(tmp_path: Path) -> None:
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

    run(tmp_path, body)


def test_a_definition_must_have_the_hash_of_its_content(tmp_path: Path) -> None:
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

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (step_range(1, pattern_hash=S.hash), f"{S.hash.hex()} is not a Pattern"),
        (step_range(1, shapes_hash=L.hash), f"{L.hash.hex()} is not the Shapes of pattern {P.hash.hex()}"),
        (facts(modules_hash=P.hash), f"{P.hash.hex()} is not a Modules"),
    ],
)
def test_a_frame_must_fit_what_it_refers_to(tmp_path: Path, content: records_pb2.StepRange, reason: str) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            await agent.send(definitions=ALL)
            await agent.send(frames=frames(content))
            assert await agent.receive() == ingest_pb2.Rejected(frame=1, reason=reason)
            assert await agent.receive() == ack(1)

    run(tmp_path, body)


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
def test_a_malformed_hello_ends_the_stream_with_a_sentence(
    tmp_path: Path, fields: dict[str, object], sentence: str
) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.send(hello=hello(**fields))  # type: ignore[arg-type]
            assert await agent.status() == ("INVALID_ARGUMENT", sentence)
        assert service.store.runs() == []

    run(tmp_path, body)


def test_a_stream_must_begin_with_its_one_hello(tmp_path: Path) -> None:
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

    run(tmp_path, body)


def test_silence_ends_a_stream(tmp_path: Path) -> None:
    async def body(service: Service) -> None:
        async with Agent(service.port) as agent:
            await agent.hello()
            assert await agent.status() == ("DEADLINE_EXCEEDED", "nothing was sent for 0.2 s")

    run(tmp_path, body, Limits(silence_s=0.2))


def test_malformed_heartbeats_and_goodbyes_are_answered_and_the_stream_goes_on(tmp_path: Path) -> None:
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

    run(tmp_path, body)


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
