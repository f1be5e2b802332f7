"""Reading captures, completeness and the later counters: what is refused, and what older agents leave out."""

from __future__ import annotations

from typing import Any

import pytest

from commwatch.service.domain.captures import MAX_CAPTURED_STEPS, MAX_RECORDS, CapturedRecord, CapturedValue
from commwatch.service.domain.records import Completeness, Frame
from commwatch.service.ingest import wire
from commwatch.service.ingest.captures import CaptureLimits
from commwatch.service.ingest.checks import MalformedError
from commwatch.v1 import ingest_pb2, records_pb2
from tests.contract import samples as stored
from tests.contract import wire_samples as sent

BIG = 2**63


def read(content: sent.Content) -> object:
    (message,) = sent.frames(content).frames
    return wire.read_frame(message).content


def test_a_capture_is_read_in_full() -> None:
    (message,) = sent.frames(sent.capture(7, 2, False, 5, dropped_records=4, reason="full"), first=9).frames
    assert wire.read_frame(message) == Frame(9, stored.capture(7, 2, False, 5, 4, "full"))


def test_keywords_lists_ids_hashes_and_symbolic_lengths_are_read() -> None:
    message = sent.capture()
    keyword = message.calls[5].arguments.add(name="sizes")
    keyword.list.values.add(text="1")
    keyword.list.values.add().tensor.CopyFrom(records_pb2.CapturedTensor(type="ft", shape=[-1], id=7))
    message.records[5].output_hash = "1.5"
    found = read(message)
    value = found.calls[5].arguments[1]  # type: ignore[attr-defined]
    assert (value.name, value.value[0]) == ("sizes", CapturedValue("", "1"))
    assert (value.value[1].value.shape, value.value[1].value.id) == ((-1,), 7)
    assert found.records[5] == CapturedRecord(2, 5, None, None, "1.5")  # type: ignore[attr-defined]


def test_a_refusal_may_come_before_the_first_step() -> None:
    assert read(sent.refusal(3, "this torch lacks a hook")) == stored.refusal(3, "this torch lacks a hook")
    for request, reason in ((0, "why"), (3, "")):
        with pytest.raises(MalformedError, match="a capture of step 0"):
            read(sent.refusal(request, reason))


def nested(levels: int) -> records_pb2.CapturedCall:
    call = records_pb2.CapturedCall(kind=records_pb2.CAPTURED_KIND_OP)
    values: Any = call.arguments
    for _ in range(levels):
        values = values.add().list.values
    values.add(text="x")
    return call


def record(**fields: Any) -> dict[str, Any]:
    return {"records": [records_pb2.CapturedRecord(**fields)]}


def one_call(**fields: Any) -> dict[str, Any]:
    return {"calls": [records_pb2.CapturedCall(**{"kind": records_pb2.CAPTURED_KIND_OP, **fields})], "records": []}


COLLECTIVE: dict[str, Any] = {"kind": "all_gather", "phase": "forward"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"part": 0}, "part 0 of a capture, not one of 1 to 1000"),
        ({"part": 1001}, "part 1001 of a capture, not one of 1 to 1000"),
        ({"step": BIG}, f"the step of a capture is {BIG}, more than {BIG - 1}"),
        ({"request": BIG}, f"the request of a capture is {BIG}, more than {BIG - 1}"),
        ({"dropped_records": BIG}, f"dropped records is {BIG}, more than {BIG - 1}"),
        (record(depth=1001), "a record has the depth 1001, more than 1000"),
        (record(call=6), "a record refers to call 6 of 6"),
        (record(line=2), "a record refers to line 2 of 1"),
        (record(position=1_000_001), "a record has the position 1000001, more than 1000000"),
        (record(output_hash="x" * 257), "the hash of outputs has 257 characters, more than 256"),
        ({"calls": [records_pb2.CapturedCall()]}, "a record has the unknown kind 0"),
        (one_call(kind=14), "a record has the unknown kind 14"),
        (one_call(name="x" * 1025), "the name of a record has 1025 characters, more than 1024"),
        (
            one_call(arguments=[records_pb2.CapturedValue(text="x" * 201)]),
            "an argument has 201 characters, more than 200",
        ),
        (
            one_call(arguments=[sent.tensor("t", *([1] * 65))]),
            "65 dimensions of a tensor, more than 64",
        ),
        (one_call(outputs=[sent.tensor("t", -2)]), "the length of a dimension is less than -1"),
        (
            one_call(collectives=[records_pb2.CapturedCollective(**{**COLLECTIVE, "kind": "gossip"})]),
            "a kind is 'gossip', not one of all_gather, ",
        ),
        (
            one_call(collectives=[records_pb2.CapturedCollective(**{**COLLECTIVE, "phase": "lunch"})]),
            "a phase is 'lunch', not one of forward, ",
        ),
        (
            one_call(collectives=[records_pb2.CapturedCollective(**COLLECTIVE)] * 1001),
            "1001 collectives of a record, more than 1000",
        ),
        ({"calls": [nested(9)], "records": []}, "a value holds lists more than 8 deep"),
        (
            one_call(
                arguments=[records_pb2.CapturedValue(text="x")] * 6_000, outputs=[records_pb2.CapturedValue()] * 4_001
            ),
            "a record has more than 10000 values",
        ),
        (
            {"records": [records_pb2.CapturedRecord()] * (MAX_RECORDS + 1)},
            f"{MAX_RECORDS + 1} records in a capture, more than {MAX_RECORDS}",
        ),
    ],
)
def test_malformed_captures_are_refused_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedError) as refused:
        read(sent.capture(**fields))
    assert reason in str(refused.value)


def test_what_is_at_its_limit_is_read() -> None:
    fields: dict[str, Any] = {
        "calls": [nested(8)],
        "records": [records_pb2.CapturedRecord(depth=1000, line=1, position=1_000_000)],
    }
    assert read(sent.capture(**fields)).records == (CapturedRecord(1000, 0, 0, 1_000_000),)  # type: ignore[attr-defined]


def test_the_parts_of_a_step_are_limited_together_and_a_resend_counts_once() -> None:
    limits = CaptureLimits({3: {1: MAX_RECORDS - 10}})
    small = stored.capture(3, 2)
    assert len(small.records) == 6
    limits.check(small)
    limits.check(small)
    with pytest.raises(MalformedError, match=f"step 3 has {MAX_RECORDS + 2} captured records, more than {MAX_RECORDS}"):
        limits.check(stored.capture(3, 3))
    limits.check(stored.capture(4, 1))


def test_the_captured_steps_of_a_rank_are_limited() -> None:
    limits = CaptureLimits({step: {1: 1} for step in range(1, MAX_CAPTURED_STEPS + 1)})
    limits.check(stored.capture(5, 2))
    limits.check(stored.refusal(1, "no"))
    with pytest.raises(MalformedError, match="the rank captured 1000 steps before, as many as are stored"):
        limits.check(stored.capture(MAX_CAPTURED_STEPS + 1))


def test_completeness_is_read_and_a_group_without_a_source_has_no_expectation() -> None:
    message = sent.completeness(3, 4, 9, 2, unequal_steps=1, first_unequal_step=9)
    assert read(message) == stored.completeness(3, 4, 9, 2)
    message.groups[1].expected = 7
    assert read(message) == stored.completeness(3, 4, 9, 2)
    assert read(sent.completeness(graph_calls=5)) == stored.completeness(graph_calls=5)
    assert read(records_pb2.Completeness()) == Completeness(0, (), 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"unequal_steps": 1}, "1 unequal steps up to step 1, the first of them step 0"),
        ({"unequal_steps": 2, "first_unequal_step": 1}, "2 unequal steps up to step 1, the first of them step 1"),
        ({"unequal_steps": 1, "first_unequal_step": 2}, "1 unequal steps up to step 1, the first of them step 2"),
        ({"unattributed": BIG}, f"unattributed is {BIG}, more than {BIG - 1}"),
        ({"graph_calls": BIG}, f"graph_calls is {BIG}, more than {BIG - 1}"),
        ({"recorded": BIG}, f"recorded calls is {BIG}, more than {BIG - 1}"),
        ({"expected": BIG}, f"expected calls is {BIG}, more than {BIG - 1}"),
    ],
)
def test_malformed_completeness_is_refused_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedError) as refused:
        read(sent.completeness(**fields))
    assert str(refused.value) == reason


def test_groups_are_limited() -> None:
    message = records_pb2.Completeness(groups=[records_pb2.GroupCompleteness()] * 4_097)
    with pytest.raises(MalformedError, match="4097 groups, more than 4096"):
        read(message)


def test_counters_of_an_agent_that_does_not_know_them_are_unknown_and_not_zero() -> None:
    old = wire.read_progress(sent.progress())
    counters = ("expected_calls", "unverified_calls", "unattributed_calls", "recording_ns", "elapsed_ns")
    assert [getattr(old, name) for name in counters] == [None] * 5
    message = sent.progress()
    message.unverified_calls, message.elapsed_ns = 3, 10
    new = wire.read_progress(message)
    assert [getattr(new, name) for name in counters] == [0, 3, 0, 0, 10]
    message.recording_ns = BIG
    with pytest.raises(MalformedError, match=f"recording_ns is {BIG}"):
        wire.read_progress(message)


def test_a_frame_of_a_newer_release_is_refused() -> None:
    with pytest.raises(MalformedError, match="the frame holds no record that this release knows"):
        wire.read_frame(ingest_pb2.Frame(number=1))
