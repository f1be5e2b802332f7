"""Two runs by name: how they differ, and whether a gate lets the head pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commwatch.service.domain.baselines import accepted_in_words, effective_base, may_be_baseline, path_between
from commwatch.service.domain.changes import Comparison, NoVerdict
from commwatch.service.domain.compare import compare, incomparable
from commwatch.service.domain.policy import Judgement, judge
from commwatch.service.domain.runs import Rank, Run
from commwatch.service.domain.steady import NotSteady, Reason, ranks_in_words
from commwatch.service.domain.wording import short_id
from commwatch.service.store.contract import Store
from commwatch.service.verdicts.reading import load_steady
from commwatch.service.verdicts.refs import NoRunError, Resolved, find

MAX_ACCEPTED_RUNS = 200
"""Newest accepted runs of a workload that may stand in for a gate's base."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of comparing two runs. ``verdict`` is one of ``policy.VERDICTS``.

    ``base_reason`` says why this base, without an end mark. ``reasons`` say why there is no verdict; ``comparison``
    and ``judgement`` are None exactly then. A side is None when no run could be found for it.
    """

    verdict: str
    base: Run | None
    head: Run | None
    base_reason: str
    comparison: Comparison | None
    judgement: Judgement | None
    reasons: tuple[Reason, ...]


def compare_refs(store: Store, project: str, base_ref: str, head_ref: str, workload: str | None = None) -> Verdict:
    """Compare the runs two names stand for, whatever their state. Raises RefError for a name that means nothing."""
    sides = _sides(store, project, base_ref, head_ref, workload)
    if isinstance(sides, Verdict):
        return sides
    bases, head = sides
    return judge_runs(store, _pick_base(bases, head), head, f"named as {base_ref}")


def gate(store: Store, project: str, base_ref: str, head_ref: str, workload: str | None, *, strict: bool) -> Verdict:
    """Decide whether the head may pass. Raises RefError for a name that means nothing.

    Both runs must be whole. A base of a dirty tree counts only when accepted. An accepted run between base and head
    stands in for the base.
    """
    sides = _sides(store, project, base_ref, head_ref, workload)
    if isinstance(sides, Verdict):
        return sides
    bases, head = sides
    base = _pick_base(bases, head)
    base_reason = f"named as {base_ref}"
    if base.accepted_reason is not None:
        base_reason += f", {accepted_in_words(base)}"
    path = path_between(
        base.commit_sha, head.commit_sha, _ancestors(store, project, base), _ancestors(store, project, head)
    )
    stand_in = effective_base(base, head, _accepted_runs(store, head), path)
    if stand_in is not None:
        base_reason = f"{stand_in.reason}; it stands in for {base_ref}, run {short_id(base.id)}"
        base = stand_in.run
    reasons = [*_unfit_head(store, head), *_unfit_base(store, base)]
    if reasons:
        return _no_verdict(reasons, base, head, base_reason)
    return judge_runs(store, base, head, base_reason, strict=strict)


def judge_runs(store: Store, base: Run, head: Run, base_reason: str, *, strict: bool = False) -> Verdict:
    """Compare two stored runs and apply the policy."""
    reasons = incomparable(base, head)
    if reasons:
        return _no_verdict(reasons, base, head, base_reason)
    steady_base = load_steady(store, base)
    steady_head = steady_base if base.id == head.id else load_steady(store, head)
    if isinstance(steady_base, NotSteady) or isinstance(steady_head, NotSteady):
        sides = (("base", steady_base), ("head", steady_head))
        found = [(side, steady.reasons) for side, steady in sides if isinstance(steady, NotSteady)]
        unsteady = [Reason(reason.code, f"{_of(side)}: {reason.message}") for side, why in found for reason in why]
        return _no_verdict(unsteady, base, head, base_reason)
    comparison = compare(steady_base, steady_head)
    if isinstance(comparison, NoVerdict):
        return _no_verdict(comparison.reasons, base, head, base_reason)
    judgement = judge(comparison)
    return Verdict(judgement.verdict(strict=strict), base, head, base_reason, comparison, judgement, ())


def _sides(
    store: Store, project: str, base_ref: str, head_ref: str, workload: str | None
) -> tuple[Resolved, Run] | Verdict:
    """The runs of both names; a verdict when one names a commit that never ran."""
    head: Run | None = None
    try:
        head = find(store, project, head_ref, workload).newest
        return find(store, project, base_ref, head.workload if workload is None else workload), head
    except NoRunError as error:
        side = "head" if head is None else "base"
        code = "no_run" if head is None else "no_baseline"
        return _no_verdict([Reason(code, f"{_of(side)}: {error.message}")], None, head, "")


def _of(side: str) -> str:
    return f"The {side} run" if side in {"base", "head"} else side


def _pick_base(bases: Resolved, head: Run) -> Run:
    """The run that is fittest to compare with: equal environment, then accepted or complete and clean, then newest."""
    return max(
        bases.runs,
        key=lambda run: (
            not incomparable(run, head),
            run.accepted_reason is not None,
            may_be_baseline(run),
            run.state == "complete",
            run.started_unix_ns,
        ),
    )


def _no_verdict(reasons: Sequence[Reason], base: Run | None, head: Run | None, base_reason: str) -> Verdict:
    return Verdict("no_verdict", base, head, base_reason, None, None, tuple(reasons))


def _ancestors(store: Store, project: str, run: Run) -> list[str]:
    return store.first_parents(project, run.commit_sha) if run.commit_sha else []


def _accepted_runs(store: Store, head: Run) -> list[Run]:
    baselines = store.baselines(head.project, head.workload)[:MAX_ACCEPTED_RUNS]
    return [run for run in (store.run(baseline.run_id) for baseline in baselines) if run is not None]


def _unfit_head(store: Store, head: Run) -> list[Reason]:
    if head.state == "complete":
        return []
    return [Reason("incomplete_run", f"The head run is {in_which_state(head, store.ranks(head.id))}.")]


def _unfit_base(store: Store, base: Run) -> list[Reason]:
    if may_be_baseline(base):
        return []
    if base.state != "complete":
        return [Reason("incomplete_run", f"The base run is {in_which_state(base, store.ranks(base.id))}.")]
    command = f"commwatch accept {short_id(base.id)} --reason TEXT"
    return [Reason("dirty_base", f"The base run is of a dirty tree and nobody accepted it. To do so: {command}")]


def in_which_state(run: Run, ranks: Sequence[Rank]) -> str:
    """``still running``, or ``lost: rank 2 lost, ranks 3-4 never reported``."""
    if run.state == "running":
        return f"still running: {len(ranks)} of {run.expected_ranks} ranks reported"
    by_state: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.state not in ("clean", "live"):
            by_state.setdefault(rank.state, []).append(rank.rank)
    words = {"exception": "ended with an exception", "lost": "lost"}
    parts = [f"{ranks_in_words(numbers).lower()} {words[state]}" for state, numbers in sorted(by_state.items())]
    missing = run.expected_ranks - len(ranks)
    if missing > 0:
        parts.append(f"{missing} of {run.expected_ranks} ranks never reported")
    return f"{run.state}: {', '.join(parts)}" if parts else run.state
