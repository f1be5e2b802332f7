"""The steady step: which pattern, which numbers, and when there are none."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from commwatch.service.domain.records import BytesStatistics, Definition, Line, StepRange
from commwatch.service.domain.runs import RankRanges
from commwatch.service.domain.steady import Choice, LeftOut, NotSteady, choose, ranks_in_words
from commwatch.service.domain.steady_run import Payload, SteadyRun, build
from tests.unit.service.domain.jobs import Calls, Job, define, layers

A = define((Calls("all_gather", "a", 2, 100),))
B = define((Calls("all_reduce", "b", 1, 64),))
UNORDERED = define((Calls("all_reduce", "c"),), unordered=True)
ALL: dict[str, Definition] = {
    found.hash: found for parts in (A, B, UNORDERED) for found in (parts.pattern, parts.shapes, parts.lines)
}
ONE = Job(world_size=1, state="running")


def ranged(
    number: int, first: int, steps: int, parts: object = A, *, varies: bool = False, unfinished: bool = False
) -> StepRange:
    assert isinstance(parts, type(A))
    last = first + steps - 1
    shapes = None if varies else parts.shapes.hash
    return StepRange(number, first, last, steps, parts.pattern.hash, shapes, parts.lines.hash, (), 0, unfinished)


def chosen(*ranges: StepRange) -> Choice | NotSteady:
    run, ranks, _, _ = ONE.inputs()
    return choose(run, ranks, [RankRanges(0, ranges)], ALL)


def built(*ranges: StepRange, definitions: dict[str, Definition] = ALL) -> SteadyRun:
    run, ranks, _, _ = ONE.inputs()
    choice = choose(run, ranks, [RankRanges(0, ranges)], definitions)
    assert isinstance(choice, Choice)
    found = build(run, ranks, choice, definitions)
    assert isinstance(found, SteadyRun)
    return found


def test_pattern_with_most_steps_over_all_its_ranges_is_steady() -> None:
    found = chosen(ranged(1, 1, 3, A), ranged(2, 4, 4, B), ranged(3, 8, 2, A))
    assert isinstance(found, Choice)
    assert [(rank.pattern_hash, rank.steps) for rank in found.ranks] == [(A.pattern.hash, 5)]


def test_of_equally_many_steps_the_latest_pattern_is_steady() -> None:
    found = chosen(ranged(1, 1, 3, B), ranged(2, 4, 3, A))
    assert isinstance(found, Choice)
    assert found.ranks[0].pattern_hash == A.pattern.hash


@pytest.mark.parametrize(
    ("ranges", "code", "message"),
    [
        ((ranged(1, 1, 2, A),), "no_steady_pattern", "Rank 0 ran no pattern for 3 steps."),
        ((), "no_steady_pattern", "Rank 0 ran no pattern for 3 steps."),
        ((ranged(1, 1, 9, A, unfinished=True),), "no_steady_pattern", "Rank 0 ran no pattern for 3 steps."),
        (
            (ranged(1, 1, 4, A), ranged(2, 5, 100, UNORDERED)),
            "unstable",
            "Rank 0 ran too many different patterns to have a steady one.",
        ),
    ],
)
def test_without_a_steady_pattern_the_reason_is_given(ranges: tuple[StepRange, ...], code: str, message: str) -> None:
    found = chosen(*ranges)
    assert isinstance(found, NotSteady)
    assert [(reason.code, reason.message) for reason in found.reasons] == [(code, message)]
    assert found.passing


def test_unknown_definition_gives_a_reason_instead_of_a_number() -> None:
    run, ranks, ranges, _ = ONE.inputs()
    found = choose(run, ranks, ranges, {})
    assert isinstance(found, NotSteady)
    assert [reason.code for reason in found.reasons] == ["unknown_definition"]


def test_missing_rank_gives_a_reason_instead_of_a_number() -> None:
    run, ranks, ranges, definitions = Job().inputs()
    found = choose(run, ranks[:3], ranges[:3], definitions)
    assert isinstance(found, NotSteady)
    assert [reason.message for reason in found.reasons] == ["Rank 3 never reported: 3 of 4 did."]
    assert not found.passing


def test_one_process_that_stands_for_all_ranks_is_enough() -> None:
    run, ranks, ranges, definitions = Job().inputs()
    found = choose(replace(run, reporting_ranks=1), ranks[:1], ranges[:1], definitions)
    assert isinstance(found, Choice)


def test_calls_dropped_inside_of_steps_withhold_the_step() -> None:
    run, ranks, ranges, definitions = Job().inputs()
    dropped = [replace(ranks[0], dropped_calls=5), *ranks[1:]]
    found = choose(run, dropped, ranges, definitions)
    assert isinstance(found, NotSteady)
    assert [reason.message for reason in found.reasons] == ["Rank 0 dropped the records of 5 calls."]
    whole_steps = [replace(ranks[0], dropped_calls=5, dropped_steps=1), *ranks[1:]]
    assert isinstance(choose(run, whole_steps, ranges, definitions), Choice)


def test_what_is_left_out_is_said() -> None:
    found = chosen(ranged(1, 1, 2, B), ranged(2, 3, 10, A), ranged(3, 13, 1, B), ranged(4, 14, 1, A, unfinished=True))
    assert isinstance(found, Choice)
    assert found.left_out == (LeftOut((0,), 2, 1, 1, 0, True, 0),)


def test_bytes_are_exact_when_every_step_had_the_same_shapes() -> None:
    found = built(ranged(1, 1, 3, A), ranged(2, 5, 9, A))
    assert (found.calls, found.payload) == (2, Payload(Fraction(200)))


def test_bytes_of_varying_shapes_are_a_mean_over_the_measured_steps() -> None:
    statistics = (BytesStatistics(0, 8, 1000, 100, 200),)
    varying = replace(ranged(2, 4, 6, A, varies=True), statistics=statistics, statistics_steps=4)
    found = built(ranged(1, 1, 3, A), varying)
    # Three steps of 200 bytes and 1000 bytes over four more.
    assert found.payload == Payload(Fraction(1600, 7), varies=True)
    assert found.payload.exact is None


def test_bytes_without_their_shapes_are_withheld() -> None:
    definitions = {hash_: found for hash_, found in ALL.items() if hash_ != A.shapes.hash}
    found = built(ranged(1, 1, 3, A), definitions=definitions)
    assert found.payload == Payload(None, reason="The shapes of some steps have not arrived.")
    assert found.calls == 2


def test_equal_ranks_are_one_class_however_many_and_are_summed_exactly() -> None:
    job = Job(world_size=4096, step=layers(4, Calls("all_reduce", "layers.*.wo", 3, 100)), modules={"layers.*.wo": 4})
    found = job.steady()
    assert [len(cls.ranks) for cls in found.classes] == [4096]
    (site,) = found.sites
    assert (site.calls, site.ranks, site.min_calls, site.max_calls) == (12 * 4096, 4096, 12, 12)
    assert (site.payload.exact, site.modules, found.inventory) == (1200 * 4096, 4, {"layers.*.wo": 4 * 4096})


def test_site_of_some_ranks_says_how_many_and_the_range_of_calls() -> None:
    job = Job(step=(Calls("send", "stage"),), of_rank={0: (), 1: (Calls("send", "stage", 3),)})
    (site,) = job.steady().sites
    assert (site.calls, site.ranks, site.min_calls, site.max_calls) == (5, 3, 1, 3)


def test_at_most_four_lines_are_kept() -> None:
    step = tuple(Calls("all_reduce", f"layers.{n}", line=Line("m.py", n, "forward")) for n in range(6))
    (site,) = Job(step=step).steady().sites
    assert [line.line for line in site.lines] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "Rank 3"),
        ([0, 1, 2, 3, 8], "Ranks 0-3, 8"),
        (list(range(0, 40, 2)), "Ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_ranks_in_words(numbers: list[int], text: str) -> None:
    assert ranks_in_words(numbers) == text
