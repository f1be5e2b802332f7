"""The steady pattern of every rank: what a run does in an ordinary step, once warm-up and rare steps are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from commwatch.service.domain.completeness import differences, graphs_of, group_in_words
from commwatch.service.domain.records import Definition, Pattern, StepRange
from commwatch.service.domain.runs import Rank, RankRanges, Run

MIN_STEADY_STEPS = 3
"""Steps a pattern must have run before it is called steady."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why there is no number or no verdict: a stable ``code`` and a sentence for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class RankSteady:
    """The steady pattern of one rank: the ranges of one pattern, by number, and how many steps they hold."""

    rank: int
    pattern_hash: str
    ranges: tuple[StepRange, ...]
    steps: int

    @property
    def content(self) -> tuple[object, ...]:
        """Equal where pattern, bytes and lines are: one Shapes whatever its steps, or every part of a mixture."""
        shapes = {step_range.shapes_hash for step_range in self.ranges}
        lines = self.ranges[-1].lines_hash
        if len(shapes) == 1 and None not in shapes:
            return (self.pattern_hash, next(iter(shapes)), lines)
        parts = (
            (part.shapes_hash, part.steps if part.shapes_hash else 0, part.statistics, part.statistics_steps)
            for part in self.ranges
        )
        return (self.pattern_hash, *parts, lines)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What equal ranks did beside their steady pattern.

    ``warm_up_steps`` ran other patterns before its first step, ``other_steps`` after it, in ``other_patterns``
    patterns together. ``unordered_steps`` are those of windows without order. ``unfinished`` is True when calls came
    after the last finished step. ``unstored_steps`` were counted by the ranks, but their records never arrived.
    """

    ranks: tuple[int, ...]
    warm_up_steps: int
    other_steps: int
    other_patterns: int
    unordered_steps: int
    unfinished: bool
    unstored_steps: int

    @property
    def nothing(self) -> bool:
        """Every step of these ranks ran the steady pattern."""
        steps = self.warm_up_steps + self.other_steps + self.unordered_steps + self.unstored_steps
        return steps == 0 and not self.unfinished


@dataclass(frozen=True, slots=True)
class Choice:
    """The steady pattern of every rank, by rank, and what it leaves out."""

    ranks: tuple[RankSteady, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal as long as a comparison would read the same records."""
        return tuple((rank.rank, *rank.content) for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class NotSteady:
    """No steady pattern on all ranks. ``passing`` is True when more records may still change that."""

    reasons: tuple[Reason, ...]
    passing: bool


def pattern_hashes(ranges: Iterable[RankRanges]) -> set[str]:
    """Hashes of every pattern the ranks ran: the definitions ``choose`` needs."""
    return {step_range.pattern_hash for rank in ranges for step_range in rank.ranges}


def choose(
    run: Run, ranks: Sequence[Rank], ranges: Sequence[RankRanges], definitions: Mapping[str, Definition]
) -> Choice | NotSteady:
    """Choose for each rank the pattern with the most steps, at least ``MIN_STEADY_STEPS``; of equals, the latest.

    Every rank of the run must have one, it must be ordered, no record of a call of it may have been dropped, and where
    a second source counts calls, it must have counted those that were recorded, and no CUDA graph may hold a call:
    otherwise no number of the run would be exact.
    """
    reasons = [*_absent(run, ranks, ranges), *_dropped(ranks), *_incomplete(ranks), *_in_graphs(ranks)]
    chosen: list[RankSteady] = []
    short: dict[str, list[int]] = {}
    for rank in ranges:
        found = _choose_rank(rank, definitions)
        if isinstance(found, RankSteady):
            chosen.append(found)
        else:
            short.setdefault(found, []).append(rank.rank)
    reasons += [Reason(_CODES[text], f"{ranks_in_words(numbers)} {text}.") for text, numbers in short.items()]
    if reasons:
        lasting = any(reason.code in _LASTING for reason in reasons)
        return NotSteady(tuple(reasons), passing=run.state == "running" and not lasting)
    return Choice(tuple(chosen), _left_out(ranks, ranges, chosen, definitions))


def ranks_in_words(numbers: Iterable[int]) -> str:
    """``Rank 3``, ``Ranks 0-3, 8``: consecutive ranks are joined, and at most eight parts are named."""
    parts: list[list[int]] = []
    count = 0
    for number in sorted(numbers):
        count += 1
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in parts[:8]]
    rest = count - sum(last - first + 1 for first, last in parts[:8])
    more = f" and {rest} more" if rest else ""
    return f"{'Rank' if count == 1 else 'Ranks'} {', '.join(texts)}{more}"


_FEW = f"ran no pattern for {MIN_STEADY_STEPS} steps"
_UNSTABLE = "ran too many different patterns to have a steady one"
_UNKNOWN = "ran a pattern whose definition has not arrived"
_LASTING = frozenset({"dropped_calls", "graph_replays"})
"""Codes of reasons that no later record takes away."""
_CODES = {_FEW: "no_steady_pattern", _UNSTABLE: "unstable", _UNKNOWN: "unknown_definition"}


def _absent(run: Run, ranks: Sequence[Rank], ranges: Sequence[RankRanges]) -> list[Reason]:
    present = {rank.rank for rank in ranks} & {rank.rank for rank in ranges}
    if len(present) >= run.expected_ranks:
        return []
    missing = sorted(set(range(run.world_size)) - present) if run.expected_ranks == run.world_size else []
    who = ranks_in_words(missing) if missing else f"{run.expected_ranks - len(present)} ranks"
    return [Reason("missing_ranks", f"{who} never reported: {len(present)} of {run.expected_ranks} did.")]


def _dropped(ranks: Sequence[Rank]) -> list[Reason]:
    """Calls dropped inside of steps make patterns that never were; those of whole dropped steps do not."""
    numbers = [rank.rank for rank in ranks if rank.dropped_calls and not rank.dropped_steps]
    if not numbers:
        return []
    calls = sum(rank.dropped_calls for rank in ranks if not rank.dropped_steps)
    return [Reason("dropped_calls", f"{ranks_in_words(numbers)} dropped the records of {calls} calls.")]


def _incomplete(ranks: Sequence[Rank]) -> list[Reason]:
    """The first difference in full, and how many more there are. While a rank runs, a later step may make up for it."""
    found = differences(ranks)
    if not found:
        return []
    first, others = found[0], len(found) - 1
    more = f" (and {others} more)" if others else ""
    counts = f"{first.recorded} collectives on {group_in_words(first.group)}, where {first.expected} were expected"
    text = f"Rank {first.rank} recorded {counts}{more}."
    return [Reason("incomplete_recording", text)]


def _in_graphs(ranks: Sequence[Rank]) -> list[Reason]:
    """Steps that replay a graph look like steps without its calls."""
    found = graphs_of(ranks)
    if not found:
        return []
    calls = sum(item.calls for item in found)
    captured = f"{calls} collective{'' if calls == 1 else 's'} into CUDA graphs"
    who = ranks_in_words(item.rank for item in found)
    text = f"{who} captured {captured}, whose replays are not observable: what was recorded is a lower bound."
    return [Reason("graph_replays", text)]


def _choose_rank(rank: RankRanges, definitions: Mapping[str, Definition]) -> RankSteady | str:
    by_pattern: dict[str, list[StepRange]] = {}
    unordered = 0
    for step_range in rank.ranges:
        if step_range.unfinished:
            continue
        pattern = definitions.get(step_range.pattern_hash)
        if not isinstance(pattern, Pattern):
            return _UNKNOWN
        if pattern.unordered:
            unordered += step_range.steps
        else:
            by_pattern.setdefault(step_range.pattern_hash, []).append(step_range)
    if not by_pattern:
        return _UNSTABLE if unordered else _FEW
    key, found = max(by_pattern.items(), key=lambda item: (_steps(item[1]), max(r.last_step for r in item[1])))
    if unordered >= max(_steps(found), 1):
        return _UNSTABLE
    if _steps(found) < MIN_STEADY_STEPS:
        return _FEW
    return RankSteady(rank.rank, key, tuple(found), _steps(found))


def _steps(ranges: Iterable[StepRange]) -> int:
    return sum(step_range.steps for step_range in ranges)


def _left_out(
    ranks: Sequence[Rank],
    ranges: Sequence[RankRanges],
    chosen: Sequence[RankSteady],
    definitions: Mapping[str, Definition],
) -> tuple[LeftOut, ...]:
    counters = {rank.rank: max(0, rank.steps - rank.stored_steps) for rank in ranks}
    equal: dict[tuple[int, int, int, int, bool, int], list[int]] = {}
    for rank, steady in zip(ranges, chosen, strict=True):
        first = min(step_range.first_step for step_range in steady.ranges)
        warm_up = other = unordered = 0
        patterns: set[str] = set()
        unfinished = False
        for step_range in rank.ranges:
            if step_range.unfinished:
                unfinished = True
                continue
            if step_range.pattern_hash == steady.pattern_hash:
                continue
            pattern = definitions[step_range.pattern_hash]
            if isinstance(pattern, Pattern) and pattern.unordered:
                unordered += step_range.steps
                continue
            patterns.add(step_range.pattern_hash)
            if step_range.last_step < first:
                warm_up += step_range.steps
            else:
                other += step_range.steps
        found = (warm_up, other, len(patterns), unordered, unfinished, counters.get(rank.rank, 0))
        equal.setdefault(found, []).append(rank.rank)
    left_out = [LeftOut(tuple(numbers), *found) for found, numbers in equal.items()]
    return tuple(found for found in left_out if not found.nothing)
