"""Reading messages: what is refused, and that nothing else escapes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from commwatch.service.domain.records import Call, CallShapes, Cause, Frame, Group, Line, StepRange
from commwatch.service.ingest import wire
from commwatch.service.ingest.bodies import read_definition
from commwatch.service.ingest.checks import MalformedError
from commwatch.v1 import ingest_pb2, records_pb2
from tests.contract import wire_samples as sent

PATTERN, SHAPES, LINES = sent.PATTERN, sent.SHAPES, sent.LINES
BIG = 2**63


def test_definitions_are_read_in_full() -> None:
    pattern = read_definition(sent.P)
    cause = Cause("S(0)", "R", True, "aten.mm.default")
    gather = Call("forward", "all_gather", "c10d::_allgather_base_", Group("tp", 2, 1), "layers.0.wo", cause, "float32")
    assert (pattern.calls, pattern.order) == ((gather, dataclasses.replace(gather, kind="all_reduce")), (0, 1, 0))  # type: ignore[union-attr]
    assert pattern.hash == sent.P.hash.hex()
    shapes = read_definition(sent.S)
    assert (shapes.shapes, shapes.order) == ((CallShapes(((2, 4),), ((4, 4),), 32, 64),), (0, 0, 0))  # type: ignore[union-attr]
    assert read_definition(sent.L).calls == ((Line("model.py", 12, "forward"),),) * 2  # type: ignore[union-attr]
    assert read_definition(sent.M).counts == (("layers.*.wo", 2),)  # type: ignore[union-attr]


def test_a_call_without_redistribute_has_no_cause() -> None:
    call = sent.call()
    call.ClearField("cause")
    read = read_definition(sent.definition(PATTERN, records_pb2.Pattern(calls=[call], order=[0])))
    assert read.calls[0].cause is None  # type: ignore[union-attr]


def test_ranges_are_read_in_full() -> None:
    (message,) = sent.frames(sent.step_range(3, 5, 9), first=4).frames
    hashes = (sent.P.hash.hex(), sent.S.hash.hex(), sent.L.hash.hex())
    assert wire.read_frame(message) == Frame(4, StepRange(3, 5, 9, 5, *hashes))


def test_calls_after_the_last_step_have_no_steps() -> None:
    message = sent.step_range(3, 5, 5, unfinished=True)
    message.steps = 0
    assert wire.read_frame(ingest_pb2.Frame(number=1, range=message)).content.steps == 0  # type: ignore[union-attr]


def broken_pattern(**fields: object) -> ingest_pb2.Definition:
    call = sent.call()
    for name, value in fields.items():
        setattr(call, name, value)
    return sent.definition(PATTERN, records_pb2.Pattern(calls=[call], order=[0]))


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        (broken_pattern(kind="gossip"), "a kind is 'gossip', not one of all_gather, "),
        (broken_pattern(phase="lunch"), "a phase is 'lunch', not one of forward, "),
        (broken_pattern(module="m" * 1025), "the name of a module has 1025 characters, more than 1024"),
        (broken_pattern(dtype="a\0b"), "an element type holds a NUL character"),
        (
            sent.definition(PATTERN, records_pb2.Pattern(calls=[sent.call()], order=[1])),
            "the order of a pattern refers to element 1 of 1",
        ),
        (
            sent.definition(PATTERN, records_pb2.Pattern(calls=[sent.call(), sent.call("b")], order=[1, 1])),
            "a call of a pattern does not occur in its order",
        ),
        (
            sent.definition(PATTERN, records_pb2.Pattern(calls=[sent.call()], order=[0], unordered=True)),
            "an unordered pattern has an order",
        ),
        (
            sent.definition(SHAPES, records_pb2.Shapes(pattern_hash=b"short")),
            "the pattern of shapes has 5 bytes, not 16",
        ),
        (
            sent.definition(
                SHAPES,
                records_pb2.Shapes(
                    pattern_hash=sent.P.hash, shapes=[records_pb2.CallShapes(bytes_in=BIG - 1)], order=[0, 0]
                ),
            ),
            "the bytes of a step exceed a 64-bit number",
        ),
        (
            sent.definition(
                SHAPES, records_pb2.Shapes(pattern_hash=sent.P.hash, shapes=[records_pb2.CallShapes(bytes_out=BIG)])
            ),
            f"the bytes of a call is {BIG}, more than {BIG - 1}",
        ),
        (
            sent.definition(
                LINES,
                records_pb2.Lines(
                    pattern_hash=sent.P.hash, calls=[records_pb2.CallLines(lines=[records_pb2.Line()] * 5)]
                ),
            ),
            "5 lines of a call, more than 4",
        ),
        (ingest_pb2.Definition(kind=PATTERN, hash=sent.P.hash, content=b""), "has content whose hash is"),
        (ingest_pb2.Definition(kind=PATTERN, hash=b"", content=b""), "the hash of a definition has 0 bytes, not 16"),
    ],
)
def test_malformed_definitions_are_refused_with_the_reason(definition: ingest_pb2.Definition, reason: str) -> None:
    with pytest.raises(MalformedError) as refused:
        read_definition(definition)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"number": 0}, "a range has the number 0"),
        ({"first_step": 0}, "a range goes from step 0 to 1"),
        ({"first_step": 2}, "a range goes from step 2 to 1"),
        ({"last_step": BIG}, f"last_step is {BIG}, more than {BIG - 1}"),
        ({"steps": 2}, "a range from step 1 to 1 has 2 steps"),
        ({"steps": 0}, "a range from step 1 to 1 has 0 steps"),
        ({"statistics_steps": 2}, "statistics cover 2 of 1 steps"),
        ({"pattern_hash": b""}, "pattern_hash has 0 bytes, not 16"),
        ({"shapes_hash": b"x" * 17}, "shapes_hash has 17 bytes, not 16"),
        ({"statistics": [(0, 1, 4, 1, 4)]}, "a range has both shapes and statistics"),
        ({"shapes_hash": b"", "statistics": [(0, 1, 4, 1, 5)]}, "statistics are not in the order min, max, sum"),
        ({"shapes_hash": b"", "statistics": [(0, 0, 4, 1, 4)]}, "statistics count no call"),
        ({"shapes_hash": b"", "statistics": [(0, 1, 4, 4, 4)] * 2}, "two statistics of a range are of one call"),
    ],
)
def test_malformed_ranges_are_refused_with_the_reason(fields: dict[str, object], reason: str) -> None:
    message = sent.step_range()
    statistics = fields.pop("statistics", [])
    for name, value in fields.items():
        setattr(message, name, value)
    for call, count, total, least, most in statistics:  # type: ignore[attr-defined]
        message.statistics.add(call=call, count=count, sum=total, min=least, max=most)
    with pytest.raises(MalformedError) as refused:
        wire.read_frame(ingest_pb2.Frame(number=1, range=message))
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("commit", "reason"),
    [
        (ingest_pb2.Commit(sha="a b"), "the commit is 'a b', not a commit"),
        (ingest_pb2.Commit(sha="a" * 65), f"the commit is '{'a' * 65}', not a commit"),
        (ingest_pb2.Commit(ancestors=["a" * 40]), "the commit's ancestors repeat or lack it"),
        (ingest_pb2.Commit(sha="a" * 40, ancestors=["a" * 40]), "the commit's ancestors repeat or lack it"),
        (ingest_pb2.Commit(sha="a" * 40, ancestors=["b" * 40] * 201), "201 ancestors, more than 200"),
    ],
)
def test_malformed_commits_are_refused_with_the_reason(commit: ingest_pb2.Commit, reason: str) -> None:
    message = sent.hello()
    message.commit.CopyFrom(commit)
    with pytest.raises(MalformedError) as refused:
        wire.read_hello(message)
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("sha", "read"),
    [("", ""), ("ABC" + "0" * 37, "abc" + "0" * 37), ("release/2.13", "release/2.13"), (" 17:4 ", "17:4")],
)
def test_a_commit_need_not_be_of_git(sha: str, read: str) -> None:
    message = sent.hello()
    message.commit.CopyFrom(ingest_pb2.Commit(sha=sha))
    assert wire.read_hello(message).commit.sha == read


def test_long_sentences_are_cut_and_nul_is_replaced() -> None:
    message = sent.hello()
    message.commit.subject = "a\0" + "b" * 5_000
    assert wire.read_hello(message).commit.subject == "a\N{REPLACEMENT CHARACTER}" + "b" * 1_998
    assert (
        wire.read_goodbye(ingest_pb2.Goodbye(ending=ingest_pb2.ENDING_CLEAN, detail="d" * 3_000)).detail == "d" * 2_000
    )


def _read_request(content: bytes) -> None:
    request = ingest_pb2.ReportRequest.FromString(content)
    readers: list[Callable[[], object]] = [
        lambda: wire.read_hello(request.hello),
        lambda: wire.read_goodbye(request.goodbye),
        lambda: wire.read_progress(request.heartbeat.progress),
        *(lambda frame=frame: wire.read_frame(frame) for frame in request.frames.frames),
        *(lambda item=item: read_definition(item) for item in request.definitions.definitions),
    ]
    for read in readers:
        with contextlib.suppress(MalformedError):
            read()


WHOLE = [
    ingest_pb2.ReportRequest(hello=sent.hello()).SerializeToString(),
    ingest_pb2.ReportRequest(frames=sent.frames(sent.facts(), sent.step_range(1, 1, 9))).SerializeToString(),
    ingest_pb2.ReportRequest(goodbye=sent.goodbye()).SerializeToString(),
    ingest_pb2.ReportRequest(frames=sent.frames(sent.completeness(), sent.capture())).SerializeToString(),
    ingest_pb2.ReportRequest(
        definitions=ingest_pb2.DefinitionBatch(definitions=[sent.P, sent.S, sent.L, sent.M])
    ).SerializeToString(),
]


@settings(max_examples=300, deadline=None)
@given(
    whole=st.sampled_from(WHOLE),
    changes=st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damaged_messages_are_refused_and_nothing_else(whole: bytes, changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(whole)
    for at, value in changes:
        damaged[at % len(damaged)] = value
    try:
        _read_request(bytes(damaged))
    except DecodeError:
        return


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=300), kind=st.sampled_from([1, 2, 3, 4]))
def test_damaged_bodies_are_refused_and_nothing_else(content: bytes, kind: int) -> None:
    message = ingest_pb2.Definition(kind=kind, content=content)  # type: ignore[arg-type]
    message.hash = hashlib.blake2b(bytes([kind]) + content, digest_size=16).digest()
    try:
        read_definition(message)
    except MalformedError:
        return
