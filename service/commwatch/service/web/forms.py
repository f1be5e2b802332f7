"""Whole answers of the API, put together from the forms of the domain. Documented in ``docs/json.md``."""

from __future__ import annotations

from collections.abc import Iterable

from commwatch.service.domain.captures import CapturedStep, CaptureRequest, CaptureSummary
from commwatch.service.domain.completeness import completeness_of, cost_of
from commwatch.service.domain.forms.alerts import alert_to_json
from commwatch.service.domain.forms.captures import captured_step_to_json, request_to_json, summary_to_json
from commwatch.service.domain.forms.comparisons import change_to_json, payload_to_json, scaled_to_json
from commwatch.service.domain.forms.explanations import chain_to_json, path_to_json
from commwatch.service.domain.forms.numbers import VERSION, Form, reason_to_json
from commwatch.service.domain.forms.runs import (
    completeness_to_json,
    cost_to_json,
    left_out_to_json,
    rank_to_json,
    run_to_json,
    steady_site_to_json,
    steady_to_json,
)
from commwatch.service.domain.runs import Run
from commwatch.service.domain.steady import NotSteady
from commwatch.service.domain.wording import short_id
from commwatch.service.verdicts import Explanation, RunReport, Verdict

DEFAULT_PROJECT = "default"
GATE_EXIT_CODES = {"same": 0, "changed": 0, "regression": 1, "no_verdict": 3}


def report_form(report: RunReport) -> Form:
    """One run, with everything there is to say about it."""
    steady = report.steady
    reasons = steady.reasons if isinstance(steady, NotSteady) else ()
    compared = None
    if report.compared is not None:
        base, verdict, reason = report.compared
        compared = {"base_run": base, "verdict": verdict, "reason": reason}
    return {
        "version": VERSION,
        "run": run_to_json(report.run),
        "ranks": [rank_to_json(rank) for rank in report.ranks],
        "steady": None if isinstance(steady, NotSteady) else steady_to_json(steady),
        "reasons": [reason_to_json(reason) for reason in reasons],
        "compared": compared,
        "alerts": [alert_to_json(alert, events) for alert, events in report.alerts],
        "completeness": completeness_to_json(completeness_of(report.ranks)),
        "cost": cost_to_json(cost_of(report.ranks)),
        "captured": [{"step": step, "ranks": list(ranks)} for step, ranks in report.captured.items()],
    }


def explanation_form(found: Explanation) -> Form:
    """Why the calls of one site are there."""
    return {
        "version": VERSION,
        "run": run_to_json(found.run),
        "site": steady_site_to_json(found.site),
        "chain": chain_to_json(found.chain),
        "remedy": found.remedy or None,
        "path": path_to_json(found.path),
    }


def captures_form(run: Run, summaries: Iterable[CaptureSummary], requests: Iterable[CaptureRequest]) -> Form:
    """What was captured of a run, and what was asked for."""
    return {
        "version": VERSION,
        "run": run_to_json(run),
        "captures": [summary_to_json(summary) for summary in summaries],
        "requests": [request_to_json(request) for request in requests],
    }


def captured_step_form(run: Run, captured: CapturedStep) -> Form:
    """One captured step."""
    return {"version": VERSION, "run": run_to_json(run), **captured_step_to_json(captured)}


def requests_form(run: Run, requests: Iterable[CaptureRequest]) -> Form:
    """What was asked for just now."""
    return {"version": VERSION, "run": run_to_json(run), "requests": [request_to_json(found) for found in requests]}


def verdict_form(verdict: Verdict) -> Form:
    """Two runs and how they differ."""
    comparison, judgement = verdict.comparison, verdict.judgement
    return {
        "version": VERSION,
        "verdict": verdict.verdict,
        "reasons": [reason_to_json(reason) for reason in verdict.reasons],
        "base": _run_or_none(verdict.base),
        "base_reason": verdict.base_reason,
        "head": _run_or_none(verdict.head),
        "base_calls": comparison.base.calls if comparison else None,
        "head_calls": comparison.head.calls if comparison else None,
        "payload": payload_to_json(judgement.payload) if judgement else None,
        "changes": [change_to_json(judged) for judged in judgement.changes] if judgement else [],
        "scaled": [scaled_to_json(change) for change in comparison.scaled] if comparison else [],
        "left_out": {
            "base": left_out_to_json(comparison.base.left_out) if comparison else [],
            "head": left_out_to_json(comparison.head.left_out) if comparison else [],
        },
    }


def gate_form(verdict: Verdict, *, strict: bool) -> Form:
    """A comparison, and what a gate makes of it."""
    accept = None
    if verdict.head is not None and verdict.verdict == "regression":
        project = "" if verdict.head.project == DEFAULT_PROJECT else f" --project {verdict.head.project}"
        accept = f"commwatch accept {short_id(verdict.head.id)}{project} --reason TEXT"
    return {
        **verdict_form(verdict),
        "strict": strict,
        "exit_code": GATE_EXIT_CODES[verdict.verdict],
        "accept_command": accept,
    }


def _run_or_none(run: Run | None) -> Form | None:
    return None if run is None else run_to_json(run)
