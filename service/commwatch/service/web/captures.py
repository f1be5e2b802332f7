"""``/api/v1``: what was captured of a run, asking for more, and explaining a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from commwatch.service import verdicts
from commwatch.service.domain.captures import MAX_REQUEST_RANKS, MAX_REQUEST_STEPS
from commwatch.service.domain.forms.numbers import Form
from commwatch.service.domain.runs import Run
from commwatch.service.store.contract import Store
from commwatch.service.web.forms import (
    DEFAULT_PROJECT,
    captured_step_form,
    captures_form,
    explanation_form,
    report_form,
    requests_form,
)
from commwatch.service.web.parameters import Name, OptionalName

BIGINT_MAX = 2**63 - 1
INT_MAX = 2**31 - 1

RankNumber = Annotated[int, Field(ge=0, le=INT_MAX)]


class Asked(BaseModel):
    """Which ranks are to capture how many of their next steps, and who asks."""

    model_config = ConfigDict(extra="forbid")

    ranks: Annotated[list[RankNumber], Field(min_length=1, max_length=MAX_REQUEST_RANKS)]
    steps: Annotated[int, Field(ge=1, le=MAX_REQUEST_STEPS)] = 1
    author: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=255)]


def add_captures(routes: APIRouter, store: Store, clock: Callable[[], int]) -> None:
    """Add the routes. They stand before the one for a run, whose name may hold slashes."""

    @routes.get("/runs/{ref:path}/captures/{rank}/{step}")
    def captured(
        ref: str,
        rank: Annotated[int, Path(ge=0, le=INT_MAX)],
        step: Annotated[int, Path(ge=1, le=BIGINT_MAX)],
        project: Name = DEFAULT_PROJECT,
        workload: OptionalName = None,
    ) -> Form:
        run = verdicts.resolve(store, project, ref, workload)
        return captured_step_form(run, verdicts.captured_step(store, run, rank, step))

    @routes.get("/runs/{ref:path}/captures")
    def captures(ref: str, project: Name = DEFAULT_PROJECT, workload: OptionalName = None) -> Form:
        try:
            run = verdicts.resolve(store, project, ref, workload)
        except verdicts.UnknownRefError:
            branch = _branch(store, project, f"{ref}/captures", workload)
            if branch is None:
                raise
            return report_form(verdicts.show(store, branch.id))
        return captures_form(run, store.captures(run.id), store.capture_requests(run.id))

    @routes.post("/runs/{ref:path}/captures")
    def ask(ref: str, asked: Asked, project: Name = DEFAULT_PROJECT, workload: OptionalName = None) -> Form:
        run = verdicts.resolve(store, project, ref, workload)
        number = store.ask_captures(run.id, asked.ranks, asked.steps, asked.author, clock())
        return requests_form(run, [found for found in store.capture_requests(run.id) if found.number == number])

    @routes.get("/explain")
    def explain(
        run: Name,
        site: Annotated[str, Query(min_length=1, max_length=1100)],
        project: Name = DEFAULT_PROJECT,
        workload: OptionalName = None,
    ) -> Form:
        found = verdicts.resolve(store, project, run, workload)
        return explanation_form(verdicts.explain(store, found, site))


def _branch(store: Store, project: str, name: str, workload: str | None) -> Run | None:
    """The run of a branch that is itself called ``.../captures``."""
    try:
        return verdicts.resolve(store, project, name, workload)
    except verdicts.RefError:
        return None
