"""Sums over ranks of what was recorded and expected, and what recording cost."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from commwatch.service.domain.completeness import (
    GraphCalls,
    GroupDifference,
    RecordingCost,
    RunCompleteness,
    UnequalSteps,
    Unverified,
    completeness_of,
    cost_of,
)
from commwatch.service.domain.records import Completeness, Group
from commwatch.service.domain.runs import Rank
from commwatch.service.domain.steady import Choice, NotSteady, Reason, choose
from commwatch.service.domain.wording import cost_in_words
from tests.contract.samples import SOLO, TP, completeness
from tests.unit.service.domain.jobs import Calls, Job


def ranks_with(*found: Completeness | None) -> list[Rank]:
    _, ranks, _, _ = Job(world_size=len(found)).inputs()
    return [replace(rank, completeness=told) for rank, told in zip(ranks, found, strict=True)]


def test_nothing_reported_is_unknown_and_not_zero() -> None:
    assert completeness_of(ranks_with(None, None)) is None
    assert cost_of(ranks_with(None, None)) is None


def test_ranks_are_summed_and_those_that_differ_are_named() -> None:
    ranks = ranks_with(completeness(10, 10, 5, 1), completeness(8, 10, 5, 2), None)
    assert completeness_of(ranks) == RunCompleteness(
        ranks=(0, 1),
        silent=(2,),
        recorded=18,
        expected=20,
        unattributed=3,
        unverified=(Unverified(SOLO, 2),),
        different=(GroupDifference(1, TP, 8, 10),),
        unequal=(UnequalSteps(1, 1, 5),),
    )


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ((completeness(8, 10), None), "Rank 0 recorded 8 collectives on group tp (2 ranks), where 10 were expected."),
        ((None, completeness(11, 10)), "Rank 1 recorded 11 collectives on group tp (2 ranks), where 10 were expected."),
        (
            (completeness(8, 10), completeness(9, 10)),
            "Rank 0 recorded 8 collectives on group tp (2 ranks), where 10 were expected (and 1 more).",
        ),
        (
            (completeness(8, 10), completeness(9, 10), completeness(7, 10)),
            "Rank 0 recorded 8 collectives on group tp (2 ranks), where 10 were expected (and 2 more).",
        ),
    ],
)
@pytest.mark.parametrize("state", ["complete", "running"])
def test_a_run_that_was_not_wholly_recorded_has_no_steady_step(
    found: tuple[Completeness | None, ...], message: str, state: str
) -> None:
    run, ranks, ranges, definitions = Job(step=(Calls("all_reduce"),), world_size=len(found), state=state).inputs()
    ranks = [replace(rank, completeness=told) for rank, told in zip(ranks, found, strict=True)]
    # A later step of a running run may make up for it: a verdict on it waits for its end.
    assert choose(run, ranks, ranges, definitions) == NotSteady(
        (Reason("incomplete_recording", message),), passing=state == "running"
    )


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ((1, None, 0), "Rank 0 captured 1 collective into CUDA graphs"),
        ((0, 2, 1), "Ranks 1-2 captured 3 collectives into CUDA graphs"),
    ],
)
@pytest.mark.parametrize("state", ["complete", "running"])
def test_a_run_whose_cuda_graphs_hold_calls_has_no_steady_step_and_never_will(
    calls: tuple[int | None, ...], message: str, state: str
) -> None:
    run, ranks, ranges, definitions = Job(step=(Calls("all_reduce"),), world_size=3, state=state).inputs()
    ranks = [
        replace(rank, completeness=None if held is None else completeness(10, 10, graph_calls=held))
        for rank, held in zip(ranks, calls, strict=True)
    ]
    lower = ", whose replays are not observable: what was recorded is a lower bound."
    # Equal to what the second source counted, which sees no replay either.
    assert choose(run, ranks, ranges, definitions) == NotSteady((Reason("graph_replays", message + lower),), False)
    found = completeness_of(ranks)
    assert found is not None
    assert found.graphs == tuple(GraphCalls(rank, held) for rank, held in enumerate(calls) if held)


def test_equal_counts_and_groups_without_a_second_source_keep_the_steady_step() -> None:
    run, ranks, ranges, definitions = Job(step=(Calls("all_reduce"),), world_size=2).inputs()
    # An unequal step that was made up for leaves nothing missing.
    passing = replace(completeness(10, 10), unequal_steps=2, first_unequal_step=1)
    ranks = [replace(ranks[0], completeness=passing), ranks[1]]
    assert isinstance(choose(run, ranks, ranges, definitions), Choice)


def test_cost_is_a_mean_over_steps_and_ranks_that_measured_it() -> None:
    _, ranks, _, _ = Job(world_size=4).inputs()
    told = [
        replace(ranks[0], steps=10, recording_ns=3_000_000, elapsed_ns=200_000_000),
        replace(ranks[1], steps=30, recording_ns=5_400_000, elapsed_ns=500_000_000),
        replace(ranks[2], steps=0, recording_ns=0, elapsed_ns=5),
        ranks[3],
    ]
    cost = cost_of(told)
    assert cost == RecordingCost(2, 40, 8_400_000, 700_000_000)
    assert (cost.ns_per_step, cost.part_of_step) == (Fraction(210_000), Fraction(12, 1000))
    assert cost_in_words(cost) == "0.21 ms a step, 1.2 % of the step"


@pytest.mark.parametrize(
    ("ns_per_step", "text"),
    [
        (0, "0.000 ms a step, 0 % of the step"),
        (4_600, "0.005 ms a step, 0 % of the step"),
        (98_765, "0.099 ms a step, 0.1 % of the step"),
        (1_500_000, "1.50 ms a step, 1.5 % of the step"),
        (12_340_000, "12.3 ms a step, 12.3 % of the step"),
    ],
)
def test_small_costs_keep_their_digits(ns_per_step: int, text: str) -> None:
    assert cost_in_words(RecordingCost(1, 1, ns_per_step, 100_000_000)) == text


def test_groups_of_equal_names_on_different_strides_are_apart() -> None:
    strided = Group("tp", 2, 4)
    told = Completeness(1, tuple(replace(completeness().groups[1], group=group) for group in (TP, strided)), 0, 0, 0)
    found = completeness_of(ranks_with(told))
    assert found is not None
    assert found.unverified == (Unverified(TP, 1), Unverified(strided, 1))
