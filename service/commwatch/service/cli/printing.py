"""Text for people: at most 100 columns, readable at 80, without colour where nobody sees it."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

import click
from rich.console import Console
from rich.table import Table

from commwatch.client import forms
from commwatch.service.domain.steady import ranks_in_words

MAX_COLUMNS = 100
MIN_CUT_COLUMNS = 6
_SECOND_NS = 1_000_000_000
_STYLES = {"alert": "red", "warn": "yellow", "info": "cyan"}


def columns() -> int:
    """Width to print at: the terminal's, at most 100; 100 where the output is no terminal, or what COLUMNS says."""
    return min(shutil.get_terminal_size((MAX_COLUMNS, 24)).columns, MAX_COLUMNS)


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    fold: str = "",
    cut: Collection[str] = (),
) -> None:
    """Print a table. Columns in ``right`` are numbers; where width is short, ``fold`` wraps and ``cut`` are cut."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for place, header in enumerate(headers):
        widest = max(len(text) for text in (header, *(row[place] for row in rows)))
        shown.add_column(
            header,
            justify="right" if header in right else "left",
            no_wrap=header != fold,
            overflow="fold" if header == fold else "ellipsis",
            min_width=min(widest, MIN_CUT_COLUMNS if header in cut else len(header) if header == fold else widest),
        )
    for row in rows:
        shown.add_row(*row)
    # markup off: placements and module names may hold square brackets.
    console = Console(width=columns(), highlight=False, markup=False, file=sys.stdout)
    with console.capture() as captured:
        console.print(shown)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def labelled(label: str, text: str, width: int = 12, style: str | None = None) -> None:
    """Print text behind a label, wrapped with a hanging indent."""
    width = max(width, len(label) + 1) if label else width
    lines = textwrap.wrap(text, max(columns() - width, 20), break_long_words=False, break_on_hyphens=False) or [""]
    shown = click.style(f"{label:<{width}}", fg=style) if style else f"{label:<{width}}"
    click.echo(f"{shown}{lines[0]}")
    for line in lines[1:]:
        click.echo(f"{'':<{width}}{line}")


def change(change: forms.Change) -> None:
    """Print one change: its sentence, and what it costs."""
    group = change["group"]
    stride = f", stride {group['stride']}" if group["stride"] else ""
    of = f"group {group['name']} ({group['size']} ranks{stride})"
    labelled(change["severity"], change["sentence"], 8, _STYLES[change["severity"]])
    labelled("", "; ".join(part for part in (change["effect"], of, change["dtype"]) if part), 8)


def run_line(run: forms.Run) -> str:
    """``run 0192f3a1-b2c3 at 4be1c9d2 (main), dirty tree: Subject``."""
    at = f"at {run['commit'][:8]}" if run["commit"] else "at an unknown commit"
    branch = f" ({run['branch']})" if run["branch"] else ""
    dirty = ", dirty tree" if run["dirty"] else ""
    subject = f": {run['subject']}" if run["subject"] else ""
    return f"run {run['short_id']} {at}{branch}{dirty}{subject}"


def left_out(label: str, found: Sequence[forms.LeftOut]) -> None:
    """Print what a steady pattern leaves out; nothing when it leaves nothing out."""
    for part in found:
        labelled(label, f"{ranks_in_words(part['ranks']).lower()}: {', '.join(_left_out_parts(part))}")


def age(then_unix_ns: int, now_unix_ns: int) -> str:
    """``5s``, ``12m``, ``3h``, ``9d``."""
    seconds = max(0, now_unix_ns - then_unix_ns) // _SECOND_NS
    for limit, size, unit in ((60, 1, "s"), (3600, 60, "m"), (86_400, 3600, "h")):
        if seconds < limit:
            return f"{seconds // size}{unit}"
    return f"{seconds // 86_400}d"


def _left_out_parts(part: forms.LeftOut) -> list[str]:
    parts = []
    if part["warm_up_steps"]:
        parts.append(f"{count(part['warm_up_steps'], 'step')} before the steady pattern")
    if part["other_steps"]:
        parts.append(f"{count(part['other_steps'], 'step')} of other patterns")
    if part["unordered_steps"]:
        parts.append(f"{count(part['unordered_steps'], 'step')} without order")
    if part["unfinished"]:
        parts.append("calls after the last finished step")
    if part["unstored_steps"]:
        parts.append(f"{count(part['unstored_steps'], 'step')} that never arrived")
    return parts


def count(number: int, noun: str) -> str:
    """``1 step``, ``12,345 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
