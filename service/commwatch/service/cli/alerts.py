"""``commwatch alerts``."""

from __future__ import annotations

import time

import click

from commwatch.client import forms
from commwatch.service.cli import printing
from commwatch.service.cli.asking import EXIT_SAME, Asking, asks_service, with_git

MAX_ALERTS = 500


@click.command()
@click.option(
    "--state", type=click.Choice(["open", "accepted", "resolved", "all"]), default="open", help="Default: open."
)
@click.option("--run", metavar="RUN", help="Only alerts this run showed.")
@click.option("--limit", type=click.IntRange(1, MAX_ALERTS), default=50, help="At most so many. Default: 50.")
@asks_service
def alerts(asking: Asking, state: str, run: str | None, limit: int) -> int:
    """List unexpected changes, newest first."""
    wanted = None if state == "all" else state
    if run is None:
        found = asking.client.alerts(state=wanted, limit=limit)
    else:
        found = with_git([run], lambda ref: asking.client.alerts(state=wanted, run=ref, limit=limit))
    asking.answer(found, lambda: _print(found, wanted, time.time_ns()))
    return EXIT_SAME


def _print(found: forms.Alerts, state: str | None, now_unix_ns: int) -> None:
    if not found["alerts"]:
        click.echo(f"No {state + ' ' if state else ''}alerts.")
        return
    for alert in found["alerts"]:
        printing.labelled(alert["state"], alert["title"], 10, "red" if alert["state"] == "open" else None)
        runs = f"run {alert['run'][:13]} against {alert['base_run'][:13]}"
        age = printing.age(alert["opened_unix_ns"], now_unix_ns)
        printing.labelled("", f"{alert['workload']}, {runs}, opened {age} ago", 10)
        last = alert["events"][-1] if alert["events"] else None
        if last is not None and last["to"] == "accepted":
            printing.labelled("", f"accepted by {last['author']}: {last['reason']}", 10)
