"""Which run another one is compared with, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commwatch.service.domain.compare import Difference, environment_differences
from commwatch.service.domain.runs import Run
from commwatch.service.domain.wording import short_id

MAX_UNEQUAL = 3
"""Runs of an unequal environment that are named when no other could be the baseline."""


@dataclass(frozen=True, slots=True)
class ChosenBaseline:
    """The run to compare with. ``reason`` is a clause without an end mark; ``distance`` counts commits."""

    run: Run
    reason: str
    distance: int


@dataclass(frozen=True, slots=True)
class Unequal:
    """A run that would have been the baseline, had its environment been equal."""

    run: Run
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class NoBaseline:
    """No run to compare with. ``nearest_unequal`` are at most ``MAX_UNEQUAL``, nearest first."""

    reason: str
    nearest_unequal: tuple[Unequal, ...] = ()


def may_be_baseline(run: Run) -> bool:
    """A complete run of a clean tree, or one that a person accepted."""
    return run.accepted_reason is not None or (run.state == "complete" and not run.dirty)


def choose_baseline(head: Run, candidates: Iterable[Run], ancestors: Sequence[str]) -> ChosenBaseline | NoBaseline:
    """Choose the run at the nearest commit. ``ancestors`` are first parents of the head's commit, nearest first.

    Runs of the head's own commit count only when accepted, or, for a head run of a dirty tree, when complete and of
    the clean tree. At one commit an accepted run goes first, then the newest.
    """
    distances = {sha: distance for distance, sha in enumerate([head.commit_sha, *ancestors])}
    eligible = [run for run in candidates if _is_candidate(head, run) and run.commit_sha in distances]
    eligible.sort(key=lambda run: (distances[run.commit_sha], run.accepted_reason is None, -run.started_unix_ns))
    unequal: list[Unequal] = []
    for run in eligible:
        differences = _differences(head, run)
        if not differences:
            distance = distances[run.commit_sha]
            return ChosenBaseline(run, _why(head, run, distance), distance)
        unequal.append(Unequal(run, differences))
    return NoBaseline(_why_none(head, unequal, len(ancestors)), tuple(unequal[:MAX_UNEQUAL]))


def effective_base(base: Run, head: Run, accepted: Iterable[Run], path: Sequence[str]) -> ChosenBaseline | None:
    """The accepted run that stands in for a gate's base: the one nearest to the head in ``path``.

    ``path`` are the commits after the base's up to the head's, head first. None when there is no such run with equal
    environment: the base then stands for itself.
    """
    distances = {sha: distance for distance, sha in enumerate(path)}
    eligible = [
        run
        for run in accepted
        if run.accepted_reason is not None
        and run.id != base.id
        and (run.project, run.workload) == (head.project, head.workload)
        and (run.id == head.id or run.commit_sha in distances)
        and not _differences(head, run)
    ]
    if not eligible:
        return None
    found = min(
        eligible, key=lambda run: (distances.get(run.commit_sha, 0), run.id != head.id, -(run.accepted_unix_ns or 0))
    )
    return ChosenBaseline(found, accepted_in_words(found), distances.get(found.commit_sha, 0))


def path_between(
    base_sha: str, head_sha: str, base_ancestors: Sequence[str], head_ancestors: Sequence[str]
) -> list[str]:
    """Commits from the head's down to the base's, without that: head first.

    Where the base is no first-parent ancestor of the head, down to the nearest commit they share; only the head's
    where they share none. For two runs of one commit, that commit: an accepted run of it may stand in for the other.
    """
    if base_sha == head_sha:
        return [head_sha]
    shared = {base_sha, *base_ancestors}
    path = [head_sha]
    for sha in head_ancestors:
        if sha in shared:
            return path
        path.append(sha)
    return [head_sha]


def accepted_in_words(run: Run) -> str:
    """``accepted by Ada: needed for the new head``."""
    return f"accepted by {run.accepted_by}: {run.accepted_reason}"


def _is_candidate(head: Run, run: Run) -> bool:
    if run.id == head.id or (run.project, run.workload) != (head.project, head.workload):
        return False
    if run.commit_sha == head.commit_sha and run.accepted_reason is None:
        return head.dirty and bool(head.commit_sha) and run.state == "complete" and not run.dirty
    return may_be_baseline(run)


def _differences(head: Run, run: Run) -> tuple[Difference, ...]:
    if head.environment is None or run.environment is None:
        same = head.environment is run.environment
        return () if same else (Difference("environment", _known(run), _known(head)),)
    return environment_differences(run.environment, head.environment)


def _known(run: Run) -> str:
    return "unknown" if run.environment is None else "known"


def _why(head: Run, run: Run, distance: int) -> str:
    accepted = f", {accepted_in_words(run)}" if run.accepted_reason is not None else ""
    if distance == 0:
        if not head.commit_sha:
            return f"a run without a commit, like this one{accepted}"
        same = "the same commit" if run.dirty or not head.dirty else "the same commit without the changes of the tree"
        return f"{same}{accepted}"
    if distance == 1:
        return f"the parent commit{accepted}"
    return f"the nearest ancestor with a run, {distance} commits back{accepted}"


def _why_none(head: Run, unequal: Sequence[Unequal], ancestors: int) -> str:
    if unequal:
        nearest = unequal[0]
        fields = ", ".join(f"{found.field} {found.base} instead of {found.head}" for found in nearest.differences)
        return (
            f"No ancestor has a run of {head.workload} in this environment; "
            f"the nearest, {short_id(nearest.run.id)} at {nearest.run.commit_sha[:8]}, differs in {fields}."
        )
    if not head.commit_sha:
        return "The commit of the run is unknown, so it has no ancestors. Set COMMWATCH_COMMIT, or accept a run."
    return (
        f"None of the {ancestors} known ancestors of {head.commit_sha[:8]} has a complete, clean or accepted run "
        f"of {head.workload}."
    )
