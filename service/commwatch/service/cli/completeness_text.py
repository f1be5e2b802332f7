"""How completely a run was recorded, and at which cost, for people."""

from __future__ import annotations

from commwatch.client import forms
from commwatch.service.cli import printing
from commwatch.service.domain.capture_text import group_text
from commwatch.service.domain.records import Group
from commwatch.service.domain.steady import ranks_in_words

MAX_NAMED = 8


def print_completeness(found: forms.Completeness | None) -> None:
    """``41,233 of 41,233 collectives, 3 without module``, and a line for each rank and group that differs.

    Where CUDA graphs hold collectives the sums are said to be lower bounds, and a line says of what.
    """
    if found is None:
        printing.labelled("recorded", "completeness not reported")
        return
    printing.labelled("recorded", _sums(found))
    if found["graphs"]:
        printing.labelled("graphs", f"not observable: replays of CUDA graphs, which hold {_held(found['graphs'])}")
    first_steps = {item["rank"]: item for item in found["unequal"]}
    for item in found["different"][:MAX_NAMED]:
        counts = f"{item['recorded']:,} of {item['expected']:,} collectives on {_group(item['group'])}"
        printing.labelled("unequal", f"rank {item['rank']}: {counts}{_steps(first_steps.get(item['rank']))}")
    if len(found["different"]) > MAX_NAMED:
        printing.labelled("", f"and {len(found['different']) - MAX_NAMED} more; --json names them all")
    passing = [item for item in found["unequal"] if item["rank"] not in {other["rank"] for other in found["different"]}]
    for unequal in passing[:MAX_NAMED]:
        printing.labelled("unequal", f"rank {unequal['rank']}: equal again{_steps(unequal)}")


def print_cost(cost: forms.Cost | None, ranks: int) -> None:
    """``0.21 ms a step, 1.2 % of the step``."""
    if cost is None:
        printing.labelled("agent", "own cost not reported")
        return
    of = f" (on {cost['ranks']} of {ranks} ranks)" if cost["ranks"] < ranks else ""
    printing.labelled("agent", f"{cost['text']}{of}")


def _sums(found: forms.Completeness) -> str:
    parts = []
    if found["expected"] or found["recorded"] or not found["unverified"]:
        least = "at least " if found["graphs"] else ""
        parts.append(f"{found['recorded']:,} of {least}{found['expected']:,} collectives")
    parts.append(f"{found['unattributed']:,} without module")
    parts += [
        f"{item['recorded']:,} not verifiable ({_group(item['group'])}, no second source)"
        for item in found["unverified"]
    ]
    if found["silent_ranks"]:
        parts.append(f"not reported by {ranks_in_words(found['silent_ranks']).lower()}")
    return ", ".join(parts)


def _held(graphs: list[forms.GraphCalls]) -> str:
    """``3 collectives of rank 0, 6 collectives of each of ranks 1-7``."""
    ranks: dict[int, list[int]] = {}
    for item in graphs:
        ranks.setdefault(item["calls"], []).append(item["rank"])
    return ", ".join(
        f"{calls:,} collective{'' if calls == 1 else 's'} of {'each of ' if len(numbers) > 1 else ''}"
        f"{ranks_in_words(numbers).lower()}"
        for calls, numbers in list(ranks.items())[:MAX_NAMED]
    )


def _steps(unequal: forms.UnequalSteps | None) -> str:
    if unequal is None:
        return ""
    steps = f"{unequal['steps']} step{'' if unequal['steps'] == 1 else 's'}"
    return f", unequal in {steps}, the first step {unequal['first_step']}"


def _group(group: forms.Group) -> str:
    return group_text(Group(group["name"], group["size"], group["stride"]))
