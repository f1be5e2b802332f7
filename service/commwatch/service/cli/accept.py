"""``commwatch accept``."""

from __future__ import annotations

import click

from commwatch.client import forms
from commwatch.service.cli import printing
from commwatch.service.cli.asking import EXIT_SAME, Asking, asker, asks_service, with_git


@click.command()
@click.argument("run")
@click.option("--reason", metavar="TEXT", required=True, help="Why its changes are wanted: 1 to 1000 characters.")
@click.option("--author", metavar="NAME", help="Who accepts. Default: git's user.name, else the login.")
@click.option("--workload", metavar="NAME", help="Which workload, where several ran at that commit.")
@asks_service
def accept(asking: Asking, run: str, reason: str, author: str | None, workload: str | None) -> int:
    """Make RUN the baseline of its workload from its commit on; the open alerts it shows become accepted."""
    who = author or asker()
    found = with_git([run], lambda ref: asking.client.accept(ref, reason, who, workload=workload))
    asking.answer(found, lambda: _print(found))
    return EXIT_SAME


def _print(found: forms.Acceptance) -> None:
    accepted = found["run"]["accepted"]
    assert accepted is not None
    click.echo(f"{printing.run_line(found['run'])} is a baseline of {found['run']['workload']}")
    printing.labelled("accepted", f"by {accepted['author']}: {accepted['reason']}")
    for alert in found["accepted_alerts"]:
        printing.labelled("closed", alert["title"])
