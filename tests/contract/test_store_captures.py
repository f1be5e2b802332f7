"""What every store must do with captures, the requests for them, completeness and the recorder's cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from commwatch.service.domain.captures import (
    MAX_OPEN_REQUESTS,
    MAX_REQUESTS,
    Capture,
    CapturedRecord,
    CaptureSummary,
)
from commwatch.service.domain.records import Completeness, Frame
from commwatch.service.store.contract import OpenRequest, RequestRefusedError, Store, StreamWrite
from tests.contract.samples import (
    FORWARD,
    NOW,
    SECOND,
    capture,
    captured_calls,
    captured_records,
    completeness,
    goodbye,
    hello,
    key,
    progress,
    refusal,
    run_id,
)

COUNTERS = ("expected_calls", "unverified_calls", "unattributed_calls", "recording_ns", "elapsed_ns")


def send(
    store: Store, *contents: Capture | Completeness, first: int = 1, rank: int = 0, attempt: int = 0, now: int = NOW
) -> None:
    frames = [Frame(number, content) for number, content in enumerate(contents, first)]
    store.apply([StreamWrite(key(rank=rank, attempt=attempt), "default", list(frames))], now)


def states(store: Store) -> list[tuple[int, int, str, str]]:
    return [(item.number, item.rank, item.state, item.reason) for item in store.capture_requests(run_id(1))]


@pytest.fixture
def two_ranks(store: Store) -> Store:
    for rank in (0, 1):
        store.open_stream(hello(rank=rank, world_size=2), NOW)
    return store


def test_parts_come_back_as_one_tree(two_ranks: Store) -> None:
    send(two_ranks, capture(3, 1, False), capture(3, 2, True, dropped=5, reason="full"), now=NOW + SECOND)
    found = two_ranks.capture(run_id(1), 0, 3)
    assert found is not None
    assert found.summary == CaptureSummary(0, 3, 2, True, 0, 12, 2, 5, "full", NOW + SECOND)
    assert found.calls == captured_calls() * 2
    assert found.lines == (FORWARD, FORWARD)
    second = tuple(
        dataclasses.replace(record, call=record.call + 6, line=None if record.line is None else 1)
        for record in captured_records()
    )
    assert found.records == (*captured_records(), *second)
    assert found.records[10] == CapturedRecord(4, 10, 1, 1)
    assert two_ranks.capture(run_id(1), 1, 3) is None
    assert two_ranks.capture(run_id(1), 0, 4) is None
    assert two_ranks.capture(run_id(9), 0, 3) is None


def test_a_step_is_whole_when_every_part_up_to_the_last_came(two_ranks: Store) -> None:
    send(two_ranks, capture(3, 1, False), capture(4, 2, True), capture(5, 1, True))
    assert [(item.step, item.parts, item.whole) for item in two_ranks.captures(run_id(1))] == [
        (3, 1, False),
        (4, 1, False),
        (5, 1, True),
    ]


def test_captures_are_listed_by_step_and_rank(two_ranks: Store) -> None:
    send(two_ranks, capture(7), capture(3), rank=1)
    send(two_ranks, capture(7, request=0))
    listed = two_ranks.captures(run_id(1))
    assert [(item.step, item.rank) for item in listed] == [(3, 1), (7, 0), (7, 1)]
    assert [(item.records, item.collectives) for item in listed] == [(6, 1)] * 3
    assert two_ranks.captures(run_id(9)) == []


def test_a_resent_capture_is_stored_once(two_ranks: Store) -> None:
    send(two_ranks, capture())
    before = (two_ranks.captures(run_id(1)), two_ranks.capture(run_id(1), 0, 3))
    send(two_ranks, capture())
    # The same part in another frame: the first stays.
    send(two_ranks, capture(dropped=9), first=2, now=NOW + SECOND)
    assert (two_ranks.captures(run_id(1)), two_ranks.capture(run_id(1), 0, 3)) == before
    assert two_ranks.stored_parts(key()) == {3: {1: 6}}
    assert two_ranks.stored_parts(key(rank=1)) == {}


def test_captures_of_an_older_attempt_are_not_shown(two_ranks: Store) -> None:
    send(two_ranks, capture(), completeness())
    two_ranks.open_stream(hello(attempt=1), NOW)
    assert two_ranks.captures(run_id(1)) == []
    assert two_ranks.capture(run_id(1), 0, 3) is None
    assert [rank.completeness for rank in two_ranks.ranks(run_id(1))] == [None]
    send(two_ranks, capture(4), attempt=1)
    assert [item.step for item in two_ranks.captures(run_id(1))] == [4]


def test_the_newest_completeness_replaces_the_older_with_its_groups(two_ranks: Store) -> None:
    send(two_ranks, completeness(3, 3, 1), completeness(9, 10, 5, 2))
    send(two_ranks, completeness(3, 3, 1))
    assert [rank.completeness for rank in two_ranks.ranks(run_id(1))] == [completeness(9, 10, 5, 2), None]
    send(two_ranks, completeness(3, 3, 1, graph_calls=4), first=3)
    assert two_ranks.ranks(run_id(1))[0].completeness == completeness(3, 3, 1, graph_calls=4)
    fewer = Completeness(6, completeness(12, 12).groups[:1], 2, 1, 5, 7)
    send(two_ranks, fewer, first=4)
    assert two_ranks.ranks(run_id(1))[0].completeness == fewer


def test_later_counters_are_unknown_until_told_and_never_go_backwards(two_ranks: Store) -> None:
    def counters(rank: int) -> list[int | None]:
        return [getattr(two_ranks.ranks(run_id(1))[rank], name) for name in COUNTERS]

    def beat(*values: int | None) -> None:
        counted: dict[str, Any] = dict(zip(COUNTERS, values, strict=True))
        told = dataclasses.replace(progress(), **counted)
        two_ranks.apply([StreamWrite(key(), "default", progress=told)], NOW)

    two_ranks.apply([StreamWrite(key(), "default", progress=progress())], NOW)
    assert counters(0) == [None] * 5
    beat(10, 0, 2, 500, 9_000)
    assert counters(0) == [10, 0, 2, 500, 9_000]
    beat(9, 1, 1, 600, 8_000)
    assert counters(0) == [10, 1, 2, 600, 9_000]
    beat(*[None] * 5)
    assert counters(0) == [10, 1, 2, 600, 9_000]
    assert counters(1) == [None] * 5


def test_a_request_goes_from_asked_over_sent_to_captured_when_all_steps_came(two_ranks: Store) -> None:
    assert two_ranks.ask_captures(run_id(1), [1, 0], 2, "Ada", NOW) == 1
    assert two_ranks.ask_captures(run_id(1), [1], 1, "Bob", NOW + SECOND) == 2
    assert states(two_ranks) == [(1, 0, "asked", ""), (1, 1, "asked", ""), (2, 1, "asked", "")]
    opened = two_ranks.open_requests([run_id(1), run_id(2)])
    assert opened == [
        OpenRequest(key(rank=0), 1, 2, False),
        OpenRequest(key(rank=1), 1, 2, False),
        OpenRequest(key(rank=1), 2, 1, False),
    ]
    assert two_ranks.open_requests([run_id(2)]) == []
    two_ranks.mark_sent(opened[1:2])
    assert states(two_ranks)[1] == (1, 1, "sent", "")
    assert [item.sent for item in two_ranks.open_requests([run_id(1)])] == [False, True, False]
    send(two_ranks, capture(5, request=1), capture(6, 1, False, request=1), rank=1)
    assert states(two_ranks)[1] == (1, 1, "sent", "")
    send(two_ranks, capture(6, 2, True, request=1), first=3, rank=1)
    two_ranks.mark_sent(opened)
    found = two_ranks.capture_requests(run_id(1))
    assert [(item.state, item.captured_steps) for item in found] == [("sent", ()), ("captured", (5, 6)), ("sent", ())]
    assert (found[1].steps, found[1].asked_by, found[1].asked_unix_ns) == (2, "Ada", NOW)


def test_a_refused_request_keeps_the_reason_and_no_capture(two_ranks: Store) -> None:
    two_ranks.ask_captures(run_id(1), [0, 1], 1, "Ada", NOW)
    send(two_ranks, refusal(1, "This torch lacks a hook."))
    send(two_ranks, refusal(7, "no such request"), first=2)
    assert states(two_ranks) == [(1, 0, "refused", "This torch lacks a hook."), (1, 1, "asked", "")]
    assert two_ranks.captures(run_id(1)) == []
    assert [item.key.rank for item in two_ranks.open_requests([run_id(1)])] == [1]


def test_a_capture_whose_last_part_was_dropped_is_no_refusal(two_ranks: Store) -> None:
    two_ranks.ask_captures(run_id(1), [0], 1, "Ada", NOW)
    dropped = dataclasses.replace(refusal(1, "The spool is full."), step=5, part=2, dropped_records=9)
    send(two_ranks, capture(5, 1, False, 1), dropped)
    assert states(two_ranks) == [(1, 0, "captured", "")]
    (summary,) = two_ranks.captures(run_id(1))
    assert (summary.whole, summary.records, summary.dropped_records) == (True, 6, 9)
    assert summary.reason == "The spool is full."


@pytest.mark.parametrize(
    ("ending", "detail", "reason"),
    [
        ("clean", "", "The rank ended after 12 steps."),
        ("exception", "ValueError", "The rank ended with an exception (ValueError) after 12 steps."),
        ("lost", "", "The rank was lost after 12 steps."),
    ],
)
def test_a_request_is_missed_when_the_rank_ends_first(two_ranks: Store, ending: str, detail: str, reason: str) -> None:
    two_ranks.ask_captures(run_id(1), [0, 1], 1, "Ada", NOW)
    last = goodbye(ending, detail, progress(steps=12, last_step=12))
    two_ranks.apply([StreamWrite(key(), "default", goodbye=last)], NOW)
    assert states(two_ranks) == [(1, 0, "missed", reason), (1, 1, "asked", "")]
    # One that asks too late is told at once.
    assert two_ranks.ask_captures(run_id(1), [0], 1, "Ada", NOW) == 2
    assert states(two_ranks)[2] == (2, 0, "missed", reason)


def test_a_lost_rank_that_comes_back_may_still_answer(two_ranks: Store) -> None:
    two_ranks.ask_captures(run_id(1), [0], 1, "Ada", NOW)
    two_ranks.mark_lost(NOW + SECOND, NOW + SECOND)
    assert states(two_ranks) == [(1, 0, "missed", "The rank was lost after 0 steps.")]
    two_ranks.open_stream(hello(world_size=2), NOW + 2 * SECOND)
    assert states(two_ranks) == [(1, 0, "asked", "")]
    send(two_ranks, capture(3, request=1))
    assert states(two_ranks) == [(1, 0, "captured", "")]


def test_a_newer_attempt_misses_what_the_older_was_asked(two_ranks: Store) -> None:
    two_ranks.ask_captures(run_id(1), [0], 1, "Ada", NOW)
    two_ranks.open_stream(hello(attempt=2), NOW)
    assert states(two_ranks) == [(1, 0, "missed", "Attempt 2 of the run superseded the rank's attempt 0.")]
    assert two_ranks.ask_captures(run_id(1), [0], 1, "Ada", NOW) == 2
    assert two_ranks.open_requests([run_id(1)])[1] == OpenRequest(key(attempt=2), 2, 1, False)


def test_only_ranks_that_report_can_be_asked(two_ranks: Store) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        two_ranks.ask_captures(run_id(1), [1, 2, 7], 1, "Ada", NOW)
    assert str(refused.value) == "Ranks 2, 7 do not report in run 00000000-0000, which has ranks 0-1."
    with pytest.raises(KeyError, match=run_id(9)):
        two_ranks.ask_captures(run_id(9), [0], 1, "Ada", NOW)
    assert two_ranks.capture_requests(run_id(1)) == []


def test_a_run_has_a_limit_of_open_requests_and_answered_ones_do_not_count(two_ranks: Store) -> None:
    for number in range(1, MAX_OPEN_REQUESTS + 1):
        assert two_ranks.ask_captures(run_id(1), [0, 1], 1, "Ada", NOW) == number
    with pytest.raises(RequestRefusedError, match="has 8 open capture requests, as many as a run may have: ask again"):
        two_ranks.ask_captures(run_id(1), [0], 1, "Ada", NOW)
    send(two_ranks, capture(3, request=1))
    with pytest.raises(RequestRefusedError):
        two_ranks.ask_captures(run_id(1), [0], 1, "Ada", NOW)
    send(two_ranks, capture(3, request=1), rank=1)
    assert two_ranks.ask_captures(run_id(1), [0], 1, "Ada", NOW) == 9


def test_a_run_has_a_limit_of_requests(two_ranks: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_REQUESTS == 1_000
    monkeypatch.setattr("commwatch.service.store.captures.MAX_REQUESTS", 10)
    two_ranks.apply([StreamWrite(key(), "default", goodbye=goodbye())], NOW)
    for _ in range(10):
        two_ranks.ask_captures(run_id(1), [0], 1, "Ada", NOW)
    with pytest.raises(RequestRefusedError, match="was asked for captures 10 times, as often as a run may be"):
        two_ranks.ask_captures(run_id(1), [0], 1, "Ada", NOW)
