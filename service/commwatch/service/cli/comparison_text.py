"""The text of a comparison: of ``commwatch compare`` and of the gate."""

from __future__ import annotations

import click

from commwatch.client import forms
from commwatch.service.cli import printing

_SEVERITIES = (("alert", "alert", "alerts"), ("warn", "warning", "warnings"), ("info", "info", "info"))


def print_sides(found: forms.Comparison) -> None:
    """Which runs, and why this base."""
    for label, run in (("base", found["base"]), ("head", found["head"])):
        text = printing.run_line(run) if run is not None else "no run"
        if label == "base" and found["base_reason"]:
            text += f" [{found['base_reason']}]"
        printing.labelled(label, text, 8)


def print_differences(found: forms.Comparison) -> None:
    """What changed, or why nobody knows."""
    if found["verdict"] == "no_verdict":
        for reason in found["reasons"]:
            printing.labelled("why", reason["message"], 8)
        return
    for change in found["changes"]:
        printing.change(change)
    for site in found["scaled"]:
        printing.labelled("scaled", f"not a change, the model has another depth: {site['sentence']}", 8)
    click.echo(f"calls per step: {found['base_calls']} -> {found['head_calls']} over all ranks")
    payload = found["payload"]
    if payload is not None:
        mark = "alert: " if payload["severity"] == "alert" else ""
        click.echo(f"{mark}{payload['sentence']}")
    for side, left_out in (("base", found["left_out"]["base"]), ("head", found["left_out"]["head"])):
        printing.left_out(f"left out of {side}:", left_out)


def verdict_words(found: forms.Comparison) -> str:
    """The verdict and how many changes it rests on: ``regression: 2 alerts, 1 warning, 3 info``."""
    verdict = found["verdict"].replace("_", " ")
    severities: list[str] = [change["severity"] for change in found["changes"]]
    if found["payload"] is not None and found["payload"]["severity"] == "alert":
        severities.append("alert")
    counted = [(severities.count(name), one, many) for name, one, many in _SEVERITIES]
    counts = [f"{number} {one if number == 1 else many}" for number, one, many in counted if number]
    return f"{verdict}: {', '.join(counts)}" if counts else verdict
