"""``commwatch runs``."""

from __future__ import annotations

import time

import click

from commwatch.client import forms
from commwatch.service.cli import printing
from commwatch.service.cli.asking import EXIT_SAME, Asking, asks_service

_HEADERS = ("run", "workload", "commit", "branch", "state", "ranks", "steps", "calls/step", "alerts", "age")


@click.command()
@click.option("--workload", metavar="NAME", help="Only runs of this workload.")
@click.option("--branch", metavar="NAME", help="Only runs of this branch.")
@click.option("--state", type=click.Choice(["running", "complete", "lost"]), help="Only runs in this state.")
@click.option("--limit", type=click.IntRange(1, 200), default=20, help="At most so many. Default: 20.")
@asks_service
def runs(asking: Asking, workload: str | None, branch: str | None, state: str | None, limit: int) -> int:
    """List runs, newest first. ``*`` marks a dirty tree, ``-`` a run without a steady step."""
    found = asking.client.runs(workload=workload, branch=branch, state=state, limit=limit)
    asking.answer(found, lambda: _print(found, time.time_ns()))
    return EXIT_SAME


def _print(found: forms.Runs, now_unix_ns: int) -> None:
    if not found["runs"]:
        click.echo("No runs yet. Start a job with COMMWATCH_ENDPOINT=HOST:PORT, or try `commwatch demo`.")
        return
    rows = [_row(run, now_unix_ns) for run in found["runs"]]
    numbers = ("ranks", "steps", "calls/step", "alerts", "age")
    printing.table(_HEADERS, rows, right=numbers, cut=("workload", "branch"))
    if found["next_offset"] is not None:
        click.echo(f"There are more: --limit {min(2 * len(found['runs']), 200)} shows them.")


def _row(run: forms.ListedRun, now_unix_ns: int) -> tuple[str, ...]:
    per_step = run["calls_per_step"]
    return (
        run["short_id"],
        run["workload"],
        (run["commit"][:8] or "-") + ("*" if run["dirty"] else ""),
        run["branch"] or "-",
        run["state"],
        str(run["world_size"]),
        str(run["steps"]),
        "-" if per_step is None else str(per_step),
        str(run["open_alerts"]),
        printing.age(run["started_unix_ns"], now_unix_ns),
    )
