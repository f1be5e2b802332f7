"""``commwatch compare``."""

from __future__ import annotations

import click

from commwatch.client import forms
from commwatch.service.cli.asking import EXIT_NO_VERDICT, EXIT_SAME, Asking, asks_service, with_git
from commwatch.service.cli.comparison_text import print_differences, print_sides, verdict_words


@click.command()
@click.argument("base")
@click.argument("head")
@click.option("--workload", metavar="NAME", help="Which workload, where several ran at those commits.")
@asks_service
def compare(asking: Asking, base: str, head: str, workload: str | None) -> int:
    """Say how the steady step of HEAD differs from that of BASE.

    Each is a run id, a commit, a branch, or BRANCH~N; prefixes will do. Exits 3 when they cannot be compared.
    """
    found = with_git([base, head], lambda *refs: asking.client.compare(*refs, workload=workload))
    asking.answer(found, lambda: _print(found))
    return EXIT_NO_VERDICT if found["verdict"] == "no_verdict" else EXIT_SAME


def _print(found: forms.Comparison) -> None:
    print_sides(found)
    click.echo(verdict_words(found))
    print_differences(found)
