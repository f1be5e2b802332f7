"""Decides when a run is compared with its baseline: soon after something new, ever more rarely while it is steady."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from commwatch.service.ingest.repeats import Repeats

MAX_RUNS = 10_000
STEADY_FACTOR = 2.0
MAX_STEADY_S = 60.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run:
    last: float
    # Seconds until the next evaluation when only counters move: doubles with each of them.
    patience_s: float
    due: float | None = None


class Evaluations:
    """A ``RunListener``. Calls ``evaluate(run_id)`` in a thread, for one run at a time.

    A changed run is evaluated at most once every ``every_s`` seconds, and always once more after its last change.
    ``clock`` counts seconds. At most ``MAX_RUNS`` runs are remembered: the one that changed least recently is dropped,
    and evaluated when it changes again or the service restarts.
    """

    def __init__(self, evaluate: Callable[[str], object], *, every_s: float, clock: Callable[[], float]) -> None:
        self._evaluate = evaluate
        self._every_s = every_s
        self._clock = clock
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._woken = asyncio.Event()
        self._failures = Repeats(log)

    def run_changed(self, run_id: str) -> None:
        """Evaluate soon."""
        run = self._run(run_id)
        run.patience_s = self._every_s
        self._schedule(run, run.last + self._every_s)

    def run_progressed(self, run_id: str) -> None:
        """Evaluate when it was not for a while: a range that only grows may have become steady."""
        run = self._run(run_id)
        if run.due is None:
            run.patience_s = min(run.patience_s * STEADY_FACTOR, MAX_STEADY_S)
            self._schedule(run, run.last + run.patience_s)

    async def run(self) -> None:
        """Work until cancelled. A failing evaluation is logged and tried again at the next change."""
        while True:
            for run_id in self.take_due():
                await self._evaluate_one(run_id)
            self._woken.clear()
            dues = [run.due for run in self._runs.values() if run.due is not None]
            wait_s = min(dues) - self._clock() if dues else None
            if wait_s is not None and wait_s <= 0:
                continue
            try:
                await asyncio.wait_for(self._woken.wait(), wait_s)
            except asyncio.TimeoutError:
                continue

    async def _evaluate_one(self, run_id: str) -> None:
        try:
            await asyncio.to_thread(self._evaluate, run_id)
        except Exception as error:  # noqa: BLE001  # the edge: one run's failure must not end the service
            self._failures.warning(f"evaluation failed run={run_id}", error)

    def take_due(self) -> list[str]:
        """The runs whose time has come, noted as evaluated now."""
        now = self._clock()
        ready = [run_id for run_id, run in self._runs.items() if run.due is not None and run.due <= now]
        for run_id in ready:
            self._runs[run_id].due = None
            self._runs[run_id].last = now
        return ready

    def _run(self, run_id: str) -> _Run:
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = _Run(last=self._clock() - self._every_s, patience_s=self._every_s)
        self._runs.move_to_end(run_id)
        while len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)
        return run

    def _schedule(self, run: _Run, at: float) -> None:
        run.due = at if run.due is None else min(run.due, at)
        self._woken.set()
