"""Judging runs as they report: as soon as the steady pattern of every rank is known."""

from __future__ import annotations

import threading
from collections import OrderedDict
from weakref import WeakKeyDictionary

from commwatch.service.domain.alerting import alerts_of
from commwatch.service.domain.baselines import ChosenBaseline, NoBaseline, choose_baseline
from commwatch.service.domain.changes import NoVerdict
from commwatch.service.domain.compare import compare
from commwatch.service.domain.policy import judge
from commwatch.service.domain.runs import Run
from commwatch.service.domain.steady import Choice, NotSteady, Reason, choose, pattern_hashes
from commwatch.service.domain.steady_run import build, definition_hashes
from commwatch.service.domain.wording import short_id
from commwatch.service.store.contract import Store
from commwatch.service.verdicts.reading import load_steady

CANDIDATES = 500
"""Newest runs of the workload among which a baseline is looked for first."""
MAX_ANCESTORS = 200
"""Commits that are looked up one by one where the workload has more runs than that."""
MAX_REMEMBERED_RUNS = 10_000

_memories: WeakKeyDictionary[Store, _Memory] = WeakKeyDictionary()
_memories_lock = threading.Lock()


def evaluate(store: Store, run_id: str, now_unix_ns: int) -> None:
    """Compare a run with its baseline, record the verdict, and open alerts. Idempotent; cheap when nothing changed.

    Records nothing while the steady pattern may still come, nor for an accepted run, which is a baseline itself.
    """
    run = store.run(run_id)
    if run is None or run.accepted_reason is not None:
        return
    ranks = store.ranks(run_id)
    ranges = store.ranges(run_id)
    definitions = store.definitions(run.project, pattern_hashes(ranges))
    choice = choose(run, ranks, ranges, definitions)
    if isinstance(choice, NotSteady):
        if not choice.passing:
            _record_reasons(store, run, None, choice.reasons, now_unix_ns)
        return
    chosen = find_baseline(store, run)
    memory = _memory_of(store)
    content = _content(run, choice, chosen)
    if memory.knows(run_id, content):
        return
    if isinstance(chosen, NoBaseline):
        store.record_comparison(run_id, None, "no_verdict", chosen.reason, [], now_unix_ns)
        memory.remember(run_id, content)
        return
    base = load_steady(store, chosen.run)
    missing = definition_hashes(choice, ranks) - definitions.keys()
    head = build(run, ranks, choice, definitions | store.definitions(run.project, missing))
    if isinstance(head, NotSteady):
        if not head.passing:
            _record_reasons(store, run, chosen.run.id, head.reasons, now_unix_ns)
        return
    if isinstance(base, NotSteady):
        _record_reasons(store, run, chosen.run.id, base.reasons, now_unix_ns, prefix="The baseline: ")
        memory.remember(run_id, content)
        return
    comparison = compare(base, head)
    if isinstance(comparison, NoVerdict):
        _record_reasons(store, run, chosen.run.id, comparison.reasons, now_unix_ns)
    else:
        judgement = judge(comparison)
        alerts = alerts_of(comparison, judgement, now_unix_ns)
        reason = f"Compared with run {short_id(chosen.run.id)}: {chosen.reason}."
        store.record_comparison(run_id, chosen.run.id, judgement.verdict(), reason, alerts, now_unix_ns)
    memory.remember(run_id, content)


def find_baseline(store: Store, head: Run) -> ChosenBaseline | NoBaseline:
    """The baseline of a run: the nearest ancestor with a fit run of its workload."""
    ancestors = store.first_parents(head.project, head.commit_sha) if head.commit_sha else []
    candidates = {run.id: run for run in store.runs(project=head.project, workload=head.workload, limit=CANDIDATES)}
    everything = len(candidates) < CANDIDATES
    for baseline in store.baselines(head.project, head.workload)[:CANDIDATES]:
        if baseline.run_id not in candidates and (accepted := store.run(baseline.run_id)) is not None:
            candidates[accepted.id] = accepted
    chosen = choose_baseline(head, candidates.values(), ancestors)
    if everything or (isinstance(chosen, ChosenBaseline) and chosen.distance <= 1):
        return chosen
    # Older runs of nearer commits: they are looked up one commit at a time, nearest first.
    nearer = chosen.distance - 1 if isinstance(chosen, ChosenBaseline) else len(ancestors)
    for sha in [head.commit_sha, *ancestors][: min(nearer, MAX_ANCESTORS) + 1]:
        older = store.runs(project=head.project, workload=head.workload, commit_sha=sha, limit=CANDIDATES)
        found = choose_baseline(head, older, ancestors)
        if isinstance(found, ChosenBaseline):
            return found
    return chosen


class _Memory:
    """What was evaluated last, by run: the newest ``MAX_REMEMBERED_RUNS``."""

    def __init__(self) -> None:
        self._by_run: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def knows(self, run_id: str, content: int) -> bool:
        with self._lock:
            return self._by_run.get(run_id) == content

    def remember(self, run_id: str, content: int) -> None:
        with self._lock:
            self._by_run[run_id] = content
            self._by_run.move_to_end(run_id)
            while len(self._by_run) > MAX_REMEMBERED_RUNS:
                self._by_run.popitem(last=False)


def _memory_of(store: Store) -> _Memory:
    with _memories_lock:
        return _memories.setdefault(store, _Memory())


def _content(run: Run, choice: Choice, chosen: ChosenBaseline | NoBaseline) -> int:
    """Equal as long as an evaluation would come to the same: hashed, because ranks may be thousands."""
    base = chosen.reason if isinstance(chosen, NoBaseline) else (chosen.run.id, chosen.run.state, chosen.reason)
    return hash((run.attempt, run.environment, choice.key, base))


def _record_reasons(
    store: Store, run: Run, base_id: str | None, reasons: tuple[Reason, ...], now_unix_ns: int, prefix: str = ""
) -> None:
    reason = prefix + " ".join(found.message for found in reasons)
    store.record_comparison(run.id, base_id, "no_verdict", reason, [], now_unix_ns)
