"""``commwatch gate``."""

from __future__ import annotations

import json

import click

from commwatch.client import NotFoundError, forms
from commwatch.service.cli import printing
from commwatch.service.cli.asking import EXIT_NO_VERDICT, Asking, asks_service, error_form, with_git
from commwatch.service.cli.comparison_text import print_differences, print_sides, verdict_words
from commwatch.service.domain.wording import bytes_in_words


@click.command()
@click.option("--base", metavar="REF", required=True, help="Run, commit or branch to compare with.")
@click.option("--head", metavar="REF", required=True, help="Run, commit or branch to judge.")
@click.option("--workload", metavar="NAME", help="Which workload, where several ran at those commits.")
@click.option("--strict", is_flag=True, help="Warnings fail too.")
@asks_service
def gate(asking: Asking, base: str, head: str, workload: str | None, strict: bool) -> int:
    """Fail when HEAD communicates more than BASE.

    Exits 0 when nothing fails, 1 for a regression, 2 for wrong usage or an unknown name, 3 without a verdict (no run,
    an incomplete run, unequal environments), 4 when the service cannot answer.
    """
    try:
        found = with_git([base, head], lambda *refs: asking.client.gate(*refs, workload=workload, strict=strict))
    except NotFoundError as error:
        if error.code != "no_run":
            raise
        return _never_ran(asking, error)
    asking.answer(found, lambda: _print(found, asking))
    return found["exit_code"]


def _never_ran(asking: Asking, error: NotFoundError) -> int:
    """A commit that never ran is no wrong name: there is no verdict."""
    if asking.as_json:
        click.echo(json.dumps(error_form(error), indent=2))
    else:
        printing.labelled("why", str(error), 8)
        click.echo(f"gate: exit {EXIT_NO_VERDICT} no verdict")
    return EXIT_NO_VERDICT


def _print(found: forms.Gate, asking: Asking) -> None:
    print_sides(found)
    print_differences(found)
    if found["verdict"] == "regression":
        printing.labelled("", f"Why it matters: {_why_it_matters(found)}", 0)
    if found["accept_command"] is not None:
        click.echo("If this is wanted, accept it:")
        click.echo(f"  {found['accept_command']}{f' --url {asking.url}' if asking.url else ''}")
    click.echo(f"gate: exit {found['exit_code']} {verdict_words(found)}")


def _why_it_matters(found: forms.Gate) -> str:
    head, base = found["head_calls"], found["base_calls"]
    assert head is not None
    assert base is not None
    more = [f"{head - base} more calls"] if head > base else []
    payload = found["payload"]
    assert payload is not None
    before, after = payload["base"]["bytes"], payload["head"]["bytes"]
    if before is not None and after is not None and after > before:
        more.append(f"{bytes_in_words(after - before)} more payload")
    what = " and ".join(more) or "other calls"
    text = f"{what} in every step; each call makes all ranks of its group wait for the slowest"
    return f"{text}{' (with --strict, warnings fail)' if found['strict'] else ''}."
