"""How completely a run was recorded, and what recording cost it, over its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from commwatch.service.domain.records import Group
from commwatch.service.domain.runs import Rank


@dataclass(frozen=True, slots=True)
class GroupDifference:
    """A group of one rank whose recorded calls are not those its second source counted."""

    rank: int
    group: Group
    recorded: int
    expected: int


@dataclass(frozen=True, slots=True)
class UnequalSteps:
    """Steps of one rank at whose end the difference of a group had changed, and the first of them."""

    rank: int
    steps: int
    first_step: int


@dataclass(frozen=True, slots=True)
class GraphCalls:
    """Calls that one rank captured into CUDA graphs."""

    rank: int
    calls: int


@dataclass(frozen=True, slots=True)
class Unverified:
    """Recorded calls of a group without a second source, over all ranks."""

    group: Group
    recorded: int


@dataclass(frozen=True, slots=True)
class RunCompleteness:
    """Sums over the ``ranks`` that reported completeness, of all that said hello; ``silent`` are those that did not.

    ``recorded`` and ``expected`` count the groups that have a second source, ``unattributed`` every recorded call.
    Where there are ``graphs``, all of them are a lower bound.
    """

    ranks: tuple[int, ...]
    silent: tuple[int, ...]
    recorded: int
    expected: int
    unattributed: int
    unverified: tuple[Unverified, ...]
    different: tuple[GroupDifference, ...]
    unequal: tuple[UnequalSteps, ...]
    graphs: tuple[GraphCalls, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordingCost:
    """What recording took of the finished steps of the ``ranks`` that measured it, together. Times are nanoseconds."""

    ranks: int
    steps: int
    recording_ns: int
    elapsed_ns: int

    @property
    def ns_per_step(self) -> Fraction:
        """Mean over steps and ranks."""
        return Fraction(self.recording_ns, self.steps)

    @property
    def part_of_step(self) -> Fraction:
        """Of the time that steps took."""
        return Fraction(self.recording_ns, self.elapsed_ns)


def completeness_of(ranks: Sequence[Rank]) -> RunCompleteness | None:
    """Over the ranks of one attempt; None when none of them reported completeness."""
    told = [rank for rank in ranks if rank.completeness is not None]
    if not told:
        return None
    recorded = expected = unattributed = 0
    unverified: dict[Group, int] = {}
    unequal = []
    for rank in told:
        found = rank.completeness
        assert found is not None
        unattributed += found.unattributed
        if found.unequal_steps:
            unequal.append(UnequalSteps(rank.rank, found.unequal_steps, found.first_unequal_step))
        for item in found.groups:
            if item.expected is None:
                unverified[item.group] = unverified.get(item.group, 0) + item.recorded
            else:
                recorded += item.recorded
                expected += item.expected
    return RunCompleteness(
        ranks=tuple(rank.rank for rank in told),
        silent=tuple(rank.rank for rank in ranks if rank.completeness is None),
        recorded=recorded,
        expected=expected,
        unattributed=unattributed,
        unverified=tuple(Unverified(group, calls) for group, calls in unverified.items()),
        different=tuple(differences(told)),
        unequal=tuple(unequal),
        graphs=tuple(graphs_of(told)),
    )


def differences(ranks: Iterable[Rank]) -> list[GroupDifference]:
    """Every group of every rank whose recorded calls are not the expected ones."""
    return [
        GroupDifference(rank.rank, item.group, item.recorded, item.expected)
        for rank in ranks
        if rank.completeness is not None
        for item in rank.completeness.groups
        if item.expected is not None and item.expected != item.recorded
    ]


def graphs_of(ranks: Iterable[Rank]) -> list[GraphCalls]:
    """Every rank that captured calls into CUDA graphs: what their replays ran is not observable."""
    return [
        GraphCalls(rank.rank, rank.completeness.graph_calls)
        for rank in ranks
        if rank.completeness is not None and rank.completeness.graph_calls
    ]


def cost_of(ranks: Iterable[Rank]) -> RecordingCost | None:
    """Over the ranks that measured it in at least one finished step; None when none did."""
    measured = [(rank.steps, rank.recording_ns, rank.elapsed_ns) for rank in ranks if rank.steps]
    told = [(steps, recording, elapsed) for steps, recording, elapsed in measured if elapsed and recording is not None]
    if not told:
        return None
    steps, recording_ns, elapsed_ns = (sum(column) for column in zip(*told, strict=True))
    return RecordingCost(len(told), steps, recording_ns, elapsed_ns)


def group_in_words(group: Group) -> str:
    """``group tp (2 ranks)``."""
    return f"group {group.name or 'without a name'} ({group.size} rank{'' if group.size == 1 else 's'})"
