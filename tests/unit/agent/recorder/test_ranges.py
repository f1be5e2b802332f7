"""How finished steps become step ranges, and that nothing of it grows with the number of steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from commwatch.agent.recorder import ranges, wire
from commwatch.agent.recorder.catalog import Op
from commwatch.agent.recorder.groups import Group
from commwatch.agent.recorder.observer import Identity, Observer, Sizes
from commwatch.v1 import records_pb2
from tests.unit.agent.recorder.memory_sink import MemorySink


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


GROUP = Group("tp", 4, 1)
GATHER = Op("c10d::_allgather_base_", "all_gather", 2, False, (1,), (0,))
REDUCE = Op("c10d::allreduce_", "all_reduce", 1, False, (0,), (0,))


@pytest.fixture
def observer() -> Observer:
    made = Observer(Path("/program"))
    made.identities = [
        Identity(GATHER, GROUP, "forward", "layers.0.wo", None, "float32"),
        Identity(REDUCE, GROUP, "backward", "layers.0.wo", None, "float32"),
    ]
    made.sizes = {
        number: Sizes(((number + 1,),), ((number + 1,),), 4 * (number + 1), 4 * (number + 1)) for number in range(5000)
    }
    return made


def test_equal_steps_are_one_record_until_the_end(observer: Observer) -> None:
    sink = MemorySink()
    folded = ranges.Ranges(observer, sink, Clock())
    for _ in range(1000):
        folded.step((0, 1), (0, 0))
    assert len(sink.records) == 1
    folded.finish((), ())
    (only,) = sink.newest().values()
    assert (only.number, only.first_step, only.last_step, only.steps) == (1, 1, 1000, 1000)
    assert sink.kinds() == {wire.PATTERN: 1, wire.SHAPES: 1, wire.LINES: 1}


def test_the_pattern_is_the_same_whatever_the_shapes_and_lines(observer: Observer) -> None:
    sink = MemorySink()
    folded = ranges.Ranges(observer, sink, Clock())
    folded.step((0, 1, 0), (0, 1, 2))
    folded.step((0, 1, 0), (3, 4, 5))
    first, second = sink.records
    assert first.pattern_hash == second.pattern_hash
    assert first.shapes_hash != second.shapes_hash
    kind, content = sink.definitions[first.pattern_hash]
    pattern = records_pb2.Pattern.FromString(content)
    assert (kind, list(pattern.order), [call.kind for call in pattern.calls]) == (
        1,
        [0, 1, 0],
        ["all_gather", "all_reduce"],
    )


def test_shapes_that_change_at_every_step_add_no_record_per_step(observer: Observer) -> None:
    sink = MemorySink()
    clock = Clock()
    folded = ranges.Ranges(observer, sink, clock)
    for step in range(4000):
        folded.step((0, 1), (step, step))
    assert len(sink.records) == ranges.PRECISE_RANGES + 1
    clock.now += ranges.RESEND_S
    folded.step((0, 1), (4000, 4000))
    newest = sink.newest()
    assert len(newest) == ranges.PRECISE_RANGES + 1
    assert sum(record.steps for record in newest.values()) == 4001
    merged = newest[ranges.PRECISE_RANGES + 1]
    assert (merged.first_step, merged.last_step, merged.steps, merged.statistics_steps) == (17, 4001, 3985, 3985)
    assert merged.shapes_hash == b""
    gather = merged.statistics[0]
    assert (gather.call, gather.count, gather.min, gather.max) == (0, 3985, 4 * 17, 4 * 4001)
    assert gather.sum == sum(4 * (step + 1) for step in range(16, 4001))


def test_patterns_that_alternate_add_no_record_per_step(observer: Observer) -> None:
    sink = MemorySink()
    folded = ranges.Ranges(observer, sink, Clock())
    for _ in range(1000):
        folded.step((0,), (0,))
        folded.step((0, 1), (0, 0))
    folded.finish((), ())
    newest = sink.newest()
    assert len(newest) == 2 * (ranges.PRECISE_RANGES + 1)
    by_pattern: Counter[bytes] = Counter()
    for record in newest.values():
        by_pattern[record.pattern_hash] += record.steps
    assert sorted(by_pattern.values()) == [1000, 1000]


def test_a_long_stretch_of_a_merged_range_costs_one_counter_a_step(observer: Observer) -> None:
    sink = MemorySink()
    folded = ranges.Ranges(observer, sink, Clock())
    for step in range(ranges.PRECISE_RANGES + 1):
        folded.step((0,), (step,))
    assert folded.current is not None
    for _ in range(500):
        folded.step((0,), (ranges.PRECISE_RANGES,))
    assert folded.current.unsettled == 500
    folded.flush()
    (statistics,) = sink.newest()[folded.current.number].statistics
    payload = 4 * (ranges.PRECISE_RANGES + 1)
    assert (statistics.count, statistics.sum) == (501, 501 * payload)


def test_beyond_the_last_pattern_steps_go_to_windows_without_order(observer: Observer) -> None:
    sink = MemorySink()
    folded = ranges.Ranges(observer, sink, Clock())
    for length in range(1, ranges.MAX_PATTERNS + 1):
        folded.step((0,) * length, (0,) * length)
    before = len(sink.newest())
    for length in range(250):
        folded.step((1,) * (length + 1), (1,) * (length + 1))
    folded.finish((), ())
    windows = [record for number, record in sink.newest().items() if number > before]
    assert [(window.steps, window.statistics_steps) for window in windows] == [(100, 100), (100, 100), (50, 50)]
    assert sum(window.statistics[0].count for window in windows) == sum(range(1, 251))
    _, content = sink.definitions[windows[0].pattern_hash]
    pattern = records_pb2.Pattern.FromString(content)
    assert (pattern.unordered, list(pattern.order), len(pattern.calls)) == (True, [], 1)


def test_calls_after_the_last_step_are_an_unfinished_range(observer: Observer) -> None:
    sink = MemorySink()
    folded = ranges.Ranges(observer, sink, Clock())
    folded.step((0,), (0,))
    folded.finish((1,), (0,))
    last = sink.records[-1]
    assert (last.first_step, last.last_step, last.steps, last.unfinished) == (2, 2, 0, True)


def test_renumbered_sizes_stay_readable_until_they_are_settled(observer: Observer) -> None:
    sink = MemorySink()
    folded = ranges.Ranges(observer, sink, Clock())
    observer._size_ids = {(number,): number for number in range(5000)}
    for step in range(100):
        folded.step((0,), (step,))
    observer.forget_sizes()
    folded.finish((), ())
    assert sum(record.steps for record in sink.newest().values()) == 100
