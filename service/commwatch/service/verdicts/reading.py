"""What a stored run did."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from commwatch.service.domain.alerts import Alert, AlertEvent
from commwatch.service.domain.records import Pattern
from commwatch.service.domain.runs import Rank, Run
from commwatch.service.domain.steady import NotSteady, choose, pattern_hashes
from commwatch.service.domain.steady_run import SteadyRun, build, definition_hashes
from commwatch.service.store.contract import Store

MAX_REMEMBERED_RUNS = 1_000


@dataclass(frozen=True, slots=True)
class RunReport:
    """All there is to say about one run.

    ``compared`` is (base run, verdict, reason) of its newest comparison; ``alerts`` come with their history.
    ``captured`` are the ranks that captured a step, by step.
    """

    run: Run
    ranks: tuple[Rank, ...]
    steady: SteadyRun | NotSteady
    compared: tuple[str | None, str, str] | None
    alerts: tuple[tuple[Alert, tuple[AlertEvent, ...]], ...]
    captured: dict[int, tuple[int, ...]]


def load_steady(store: Store, run: Run) -> SteadyRun | NotSteady:
    """The ordinary step of a run, or why there is none."""
    ranks = store.ranks(run.id)
    ranges = store.ranges(run.id)
    definitions = store.definitions(run.project, pattern_hashes(ranges))
    choice = choose(run, ranks, ranges, definitions)
    if isinstance(choice, NotSteady):
        return choice
    missing = definition_hashes(choice, ranks) - definitions.keys()
    return build(run, ranks, choice, definitions | store.definitions(run.project, missing))


def show(store: Store, run_id: str) -> RunReport:
    """Report on a run. Raises KeyError when its id is unknown."""
    run = store.run(run_id)
    if run is None:
        raise KeyError(run_id)
    return RunReport(
        run=run,
        ranks=tuple(store.ranks(run_id)),
        steady=load_steady(store, run),
        compared=store.compared(run_id),
        alerts=tuple((alert, tuple(store.alert_events(alert.id))) for alert in store.alerts(run_id=run_id)),
        captured=_captured(store, run_id),
    )


def _captured(store: Store, run_id: str) -> dict[int, tuple[int, ...]]:
    by_step: dict[int, tuple[int, ...]] = {}
    for summary in store.captures(run_id):
        by_step[summary.step] = (*by_step.get(summary.step, ()), summary.rank)
    return by_step


class StepCounts:
    """Calls per steady step of runs, over all ranks; remembered as long as a run does not change.

    Reads patterns alone, not shapes, lines and modules: a list of runs asks for many.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[tuple[object, ...], int | None] = OrderedDict()
        self._lock = threading.Lock()

    def calls_per_step(self, run: Run) -> int | None:
        """Calls of one ordinary step; None when the run has none."""
        key = (run.id, run.attempt, run.state, run.steps, run.last_seen_unix_ns)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        counted = self._count(run)
        with self._lock:
            self._known[key] = counted
            while len(self._known) > MAX_REMEMBERED_RUNS:
                self._known.popitem(last=False)
        return counted

    def _count(self, run: Run) -> int | None:
        ranges = self._store.ranges(run.id)
        definitions = self._store.definitions(run.project, pattern_hashes(ranges))
        choice = choose(run, self._store.ranks(run.id), ranges, definitions)
        if isinstance(choice, NotSteady):
            return None
        lengths = {hash_: len(found.order) for hash_, found in definitions.items() if isinstance(found, Pattern)}
        return sum(lengths[rank.pattern_hash] for rank in choice.ranks)
