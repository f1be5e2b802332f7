"""``commwatch explain``."""

from __future__ import annotations

import click

from commwatch.client import capture_forms
from commwatch.service.cli import printing
from commwatch.service.cli.asking import EXIT_SAME, Asking, asks_service, with_git

_INDENT = "  "
_LABEL = 13


@click.command()
@click.argument("run")
@click.argument("site")
@click.option("--workload", metavar="NAME", help="Which workload, where several ran at that commit.")
@asks_service
def explain(asking: Asking, run: str, site: str, workload: str | None) -> int:
    """Print why the calls of SITE are there, from the line of the program to the collective.

    SITE is an id of the table that `commwatch show RUN` prints, or the start of one; or a module, with the kind of
    collective in front where that is needed: layers.*.wo or all_gather:layers.*.wo. The module may be a glob. Exits 2
    when several sites match.
    """
    found = with_git([run], lambda ref: asking.client.explain(ref, site, workload=workload))
    asking.answer(found, lambda: _print(found))
    return EXIT_SAME


def _print(found: capture_forms.Explanation) -> None:
    click.echo(printing.run_line(found["run"]))
    printing.labelled("site", found["site"]["site"], _LABEL)
    for link in found["chain"]:
        printing.labelled(link["link"], link["text"], _LABEL)
    path = found["path"]
    if path is not None:
        click.echo(f"captured in step {path['step']} of rank {path['rank']}:")
        for record in path["records"]:
            click.echo(f"{_INDENT * (record['depth'] + 1)}{record['text']}")
    if found["remedy"] is not None:
        printing.labelled("what helps", found["remedy"], _LABEL)
