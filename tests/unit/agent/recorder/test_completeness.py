"""How recorded calls are compared with numbers that a group's backend counts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commwatch.agent.recorder import completeness, torch_private
from commwatch.agent.recorder.catalog import Op
from commwatch.agent.recorder.completeness import Reconciler, advance
from commwatch.agent.recorder.cost import Cost
from commwatch.agent.recorder.groups import Group
from commwatch.agent.recorder.observer import Identity, Observer, Sizes
from tests.unit.agent.recorder.memory_sink import MemorySink

REDUCE = Op("c10d::allreduce_", "all_reduce", 1, False, (0,), (0,))
MONITORED = Op("c10d::monitored_barrier_", "barrier", 1, False, (), ())


class FakeGroup:
    """Stands for a process group: a name and the number its backend would give."""

    def __init__(self, name: str, number: int | None = 0) -> None:
        self.group_name, self.number = name, number


class Rank:
    """A reconciler with one kind of call for each group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_private, "group_sequence", lambda group: group.number)
        monkeypatch.setattr(torch_private, "group_ranks", lambda group: [0, 1])
        monkeypatch.setattr(torch_private, "living_groups", lambda: self.living)
        self.living: list[Any] = []
        self.now = 0.0
        self.sink = MemorySink()
        self.observer = Observer(Path("/"))
        self.observer.sizes[0] = Sizes(((1,),), ((1,),), 4, 4)
        self.reconciler = Reconciler(self.observer, self.sink, lambda: self.now)
        self.steps = 0

    def identity(self, group: Group, op: Op = REDUCE, module: str = "m") -> int:
        self.observer.identities.append(Identity(op, group, "forward", module, None, "float32"))
        return len(self.observer.identities) - 1

    def step(self, *identities: int, others: tuple[int, ...] = ()) -> None:
        self.steps += 1
        everything = (*identities, *others)
        raced = [(identity, 0) for identity in others]
        self.reconciler.step(self.steps, everything, (0,) * len(everything), raced)

    def groups(self) -> list[tuple[str, int, int, str]]:
        message = self.reconciler.message(self.steps)
        return [(found.group.name, found.recorded, found.expected, found.source) for found in message.groups]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


DP = Group("dp", 2, 1)


def test_equal_steps_send_one_record_for_a_new_group_and_no_more(rank: Rank) -> None:
    group, call = FakeGroup("0"), rank.identity(DP)
    for _ in range(5):
        rank.reconciler.seen(group, DP)
        group.number = (group.number or 0) + 2
        rank.step(call, call)
        rank.now += 10
    assert rank.groups() == [("dp", 10, 10, "sequence")]
    assert (rank.reconciler.unequal_steps, len(rank.sink.completeness)) == (0, 1)


def test_what_passed_the_dispatcher_by_makes_its_step_unequal_and_the_next_ones_not(rank: Rank) -> None:
    group, call = FakeGroup("0"), rank.identity(DP)
    rank.reconciler.seen(group, DP)
    for extra in (0, 1, 0, 0):
        group.number = (group.number or 0) + 1 + extra
        rank.step(call)
        rank.now += 10
    assert rank.groups() == [("dp", 4, 5, "sequence")]
    assert (rank.reconciler.unequal_steps, rank.reconciler.first_unequal_step) == (1, 2)
    assert [message.unequal_steps for message in rank.sink.completeness] == [0, 1]


def test_a_step_that_differs_every_time_is_sent_once_a_second(rank: Rank) -> None:
    group, call = FakeGroup("0"), rank.identity(DP)
    rank.reconciler.seen(group, DP)
    for _ in range(100):
        group.number = (group.number or 0) + 2
        rank.step(call)
        rank.now += 0.1
    assert rank.reconciler.unequal_steps == 100
    assert len(rank.sink.completeness) == 10


def test_calls_before_recording_and_before_a_restart_are_not_expected(rank: Rank) -> None:
    group, call = FakeGroup("0", 7), rank.identity(DP)
    rank.living = [group]
    rank.reconciler.start()
    rank.reconciler.seen(group, DP)
    group.number = 8
    rank.step(call)
    group.number = 20  # recording was stopped meanwhile
    rank.reconciler.start()
    group.number = 21
    rank.step(call)
    assert rank.groups() == [("dp", 2, 2, "sequence")]


def test_a_call_of_another_thread_that_is_not_counted_yet_is_no_difference(rank: Rank) -> None:
    group, call = FakeGroup("0"), rank.identity(DP)
    rank.reconciler.seen(group, DP)
    group.number = 1
    rank.step(call, others=(call,))
    group.number = 3
    rank.step(call)
    assert (rank.groups(), rank.reconciler.unequal_steps) == ([("dp", 3, 3, "sequence")], 0)
    group.number = 5
    rank.step(call)
    group.number = 6
    rank.step(call)
    assert (rank.groups(), rank.reconciler.first_unequal_step) == ([("dp", 5, 6, "sequence")], 4)


def test_a_group_that_is_destroyed_in_a_step_leaves_that_step_unverified(rank: Rank) -> None:
    call = rank.identity(DP)
    group: FakeGroup | None = FakeGroup("0")
    rank.reconciler.seen(group, DP)
    assert group is not None
    group.number = 2
    rank.step(call, call)
    del group
    gc.collect()
    rank.step(call)
    again = FakeGroup("0")  # torch gives the name again
    rank.reconciler.seen(again, DP)
    again.number = 1
    rank.step(call)
    assert (rank.groups(), rank.reconciler.unverified) == ([("dp", 3, 3, "sequence")], 1)
    assert rank.reconciler.unequal_steps == 0


def test_a_group_that_a_mesh_names_in_the_middle_of_a_step_is_counted_under_both_names(rank: Rank) -> None:
    world = Group("default_pg", 2, 1)
    group, before, after = FakeGroup("0"), rank.identity(world), rank.identity(DP)
    rank.reconciler.seen(group, world)
    group.number = 3
    rank.reconciler.seen(group, DP)
    group.number = 5
    rank.step(before, before, before, after, after)
    assert rank.groups() == [("default_pg", 3, 3, "sequence"), ("dp", 2, 2, "sequence")]


def test_a_backend_without_a_number_leaves_its_calls_unverified(rank: Rank) -> None:
    group, call = FakeGroup("0", None), rank.identity(DP)
    rank.reconciler.seen(group, DP)
    rank.step(call, call)
    assert (rank.groups(), rank.reconciler.expected) == ([("dp", 2, 0, "")], 0)
    assert rank.reconciler.unverified == 2


def test_a_kind_that_is_not_proved_leaves_its_group_s_step_out(rank: Rank) -> None:
    group, call, monitored = FakeGroup("0"), rank.identity(DP), rank.identity(DP, MONITORED)
    rank.reconciler.seen(group, DP)
    group.number = 5
    rank.step(call, monitored)
    group.number = 6
    rank.step(call)
    assert (rank.groups(), rank.reconciler.unverified) == ([("dp", 1, 1, "sequence")], 2)


def test_groups_beyond_the_limit_are_unverified(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completeness, "MAX_SOURCES", 1)
    first, second, other = FakeGroup("0"), FakeGroup("1"), Group("tp", 2, 1)
    rank.reconciler.seen(first, DP)
    rank.reconciler.seen(second, other)
    first.number = second.number = 1
    rank.step(rank.identity(DP), rank.identity(other))
    assert (rank.reconciler.expected, rank.reconciler.unverified) == (1, 1)


def test_calls_without_a_module_are_counted_in_phases_that_have_modules(rank: Rank) -> None:
    group = FakeGroup("0")
    rank.reconciler.seen(group, DP)
    known, unknown = rank.identity(DP), rank.identity(DP, module="")
    rank.step(known, unknown, unknown)
    rank.step(known, unknown, unknown)
    assert rank.reconciler.unattributed == 4


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("c10d::allreduce_", "all_reduce", 1),
        ("c10d::send", "send", 1),
        ("c10d::reduce_scatter_", "reduce_scatter", 4),
        ("c10d::reduce_scatter_tensor_coalesced_", "reduce_scatter", 3),
        ("c10d::monitored_barrier_", "barrier", None),
        ("c10d::new_one", "unknown", None),
        ("symm_mem::two_shot_all_reduce_", "all_reduce", 0),
    ],
)
def test_how_far_a_call_advances_gloo_s_number(name: str, kind: str, expected: int | None) -> None:
    assert advance(Op(name, kind, 0, False, (), ()), 4, 3) == expected


def test_cost_is_that_of_finished_steps() -> None:
    now = [100]
    clock: Callable[[], int] = lambda: now[0]  # noqa: E731  a clock the test moves
    cost = Cost(clock)
    now[0] = 1_000
    cost.start()
    cost.sinks_ns = 50
    now[0] = 2_000
    cost.step(began_ns=1_970, hooks_ns=20)
    assert (cost.recording_ns, cost.elapsed_ns) == (100, 1_000)
    now[0] = 2_500
    assert (cost.recording_ns, cost.elapsed_ns) == (100, 1_000)
    cost.step(began_ns=2_490, hooks_ns=0)
    assert (cost.recording_ns, cost.elapsed_ns) == (110, 1_500)
