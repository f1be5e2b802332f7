"""``/api/v1``: runs, comparisons, the gate, alerts, and accepting. Captures stand beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, StringConstraints

from commwatch.service import verdicts
from commwatch.service.domain.forms.alerts import alert_to_json
from commwatch.service.domain.forms.numbers import VERSION, Form
from commwatch.service.domain.forms.runs import run_to_json
from commwatch.service.store.contract import Store
from commwatch.service.web.captures import add_captures
from commwatch.service.web.forms import DEFAULT_PROJECT, gate_form, report_form, verdict_form
from commwatch.service.web.parameters import Name, OptionalName

MAX_RUNS = 200
MAX_OFFSET = 100_000
MAX_ALERTS = 500

RunState = Literal["running", "complete", "lost"]
AlertState = Literal["open", "accepted", "resolved"]


class Acceptance(BaseModel):
    """Why a run is made a baseline, and by whom."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=1000)]
    author: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=255)]


def router(store: Store, clock: Callable[[], int]) -> APIRouter:
    """The routes over a store. Every answer is a form of ``docs/json.md``."""
    routes = APIRouter(prefix="/api/v1")
    add_captures(routes, store, clock)
    _add_reads(routes, store)
    _add_comparisons(routes, store)

    @routes.post("/runs/{ref:path}/accept")
    def accept(
        ref: str, acceptance: Acceptance, project: Name = DEFAULT_PROJECT, workload: OptionalName = None
    ) -> Form:
        run = verdicts.resolve(store, project, ref, workload)
        open_before = store.alerts(run_id=run.id, state="open", limit=MAX_ALERTS)
        store.accept(run.id, acceptance.reason, acceptance.author, clock())
        accepted = store.alerts(run_id=run.id, state="accepted", limit=MAX_ALERTS)
        closed = {alert.id for alert in open_before}
        return {
            "version": VERSION,
            "run": run_to_json(verdicts.resolve(store, project, run.id)),
            "accepted_alerts": [
                alert_to_json(alert, store.alert_events(alert.id)) for alert in accepted if alert.id in closed
            ],
        }

    return routes


def _add_reads(routes: APIRouter, store: Store) -> None:
    counts = verdicts.StepCounts(store)

    @routes.get("/runs")
    def runs(
        project: Name = DEFAULT_PROJECT,
        workload: OptionalName = None,
        branch: OptionalName = None,
        commit: OptionalName = None,
        state: RunState | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_RUNS)] = 50,
        offset: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0,
    ) -> Form:
        found = store.runs(
            project=project,
            workload=workload,
            branch=branch,
            commit_sha=commit,
            state=state,
            limit=limit + 1,
            offset=offset,
        )
        more = len(found) > limit
        return {
            "version": VERSION,
            "runs": [{**run_to_json(run), "calls_per_step": counts.calls_per_step(run)} for run in found[:limit]],
            "next_offset": offset + limit if more else None,
        }

    @routes.get("/runs/{ref:path}")
    def show(ref: str, project: Name = DEFAULT_PROJECT, workload: OptionalName = None) -> Form:
        run = verdicts.resolve(store, project, ref, workload)
        return report_form(verdicts.show(store, run.id))

    @routes.get("/alerts")
    def alerts(
        project: Name = DEFAULT_PROJECT,
        state: AlertState | None = None,
        run: OptionalName = None,
        limit: Annotated[int, Query(ge=1, le=MAX_ALERTS)] = 100,
    ) -> Form:
        run_id = None if run is None else verdicts.resolve(store, project, run).id
        found = store.alerts(project=project, state=state, run_id=run_id, limit=limit)
        return {
            "version": VERSION,
            "alerts": [alert_to_json(alert, store.alert_events(alert.id)) for alert in found],
        }


def _add_comparisons(routes: APIRouter, store: Store) -> None:
    @routes.get("/compare")
    def compare(base: Name, head: Name, project: Name = DEFAULT_PROJECT, workload: OptionalName = None) -> Form:
        return verdict_form(verdicts.compare_refs(store, project, base, head, workload))

    @routes.get("/gate")
    def gate(
        base: Name,
        head: Name,
        project: Name = DEFAULT_PROJECT,
        workload: OptionalName = None,
        strict: bool = False,
    ) -> Form:
        return gate_form(verdicts.gate(store, project, base, head, workload, strict=strict), strict=strict)
