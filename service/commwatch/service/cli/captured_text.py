"""A captured step for people: its tree, filtered."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import click

from commwatch.client import capture_forms
from commwatch.service.cli import printing
from commwatch.service.cli.asking import Asking, with_git
from commwatch.service.domain.capture_text import tree_lines
from commwatch.service.domain.capture_tree import Filter, select
from commwatch.service.domain.captures import CapturedStep
from commwatch.service.domain.forms.captures import captured_step_from_json, captured_step_to_json


def show_captured(
    asking: Asking, run: str, rank: int | None, step: int, wanted: Filter, *, mesh: bool, workload: str | None
) -> None:
    """Print a captured step: of the lowest rank that captured it unless one is named. Raises ClientError."""

    def ask(ref: str) -> capture_forms.Capture:
        found = rank
        if found is None:
            captured = [
                item["rank"]
                for item in asking.client.captures(ref, workload=workload)["captures"]
                if item["step"] == step
            ]
            # The service says what else there is when nobody captured it.
            found = min(captured, default=0)
        return asking.client.capture(ref, found, step, workload=workload)

    form = with_git([run], ask)
    captured = captured_step_from_json(form)
    shown = select(captured, wanted)
    records = tuple(captured.records[index] for index in shown)
    filtered = cast(capture_forms.Capture, {**form, **captured_step_to_json(replace(captured, records=records))})
    asking.answer(filtered, lambda: _print(form, captured, shown, mesh=mesh))


def _print(form: capture_forms.Capture, captured: CapturedStep, shown: list[int], *, mesh: bool) -> None:
    summary = captured.summary
    click.echo(printing.run_line(form["run"]))
    counts = f"{printing.count(summary.records, 'record')}, {printing.count(summary.collectives, 'collective')}"
    part = f", {len(shown)} shown" if len(shown) < len(captured.records) else ""
    printing.labelled("captured", f"step {summary.step} of rank {summary.rank}: {counts}{part}")
    if summary.dropped_records or summary.reason:
        why = f": {summary.reason}" if summary.reason else ""
        printing.labelled("left out", f"{printing.count(summary.dropped_records, 'record')}{why}")
    if not summary.whole:
        only = "part 1" if summary.parts == 1 else f"{summary.parts} parts"
        printing.labelled("incomplete", f"only {only} arrived; the last is missing")
    for line in tree_lines(captured, shown, mesh=mesh):
        click.echo(line)
