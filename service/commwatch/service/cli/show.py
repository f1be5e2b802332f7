"""``commwatch show``."""

from __future__ import annotations

import click
from click.core import ParameterSource

from commwatch.client import forms
from commwatch.service.cli import printing
from commwatch.service.cli.asking import EXIT_SAME, Asking, asks_service, with_git
from commwatch.service.cli.captured_text import show_captured
from commwatch.service.cli.completeness_text import print_completeness, print_cost
from commwatch.service.domain.capture_tree import Filter
from commwatch.service.domain.captures import CAPTURED_KINDS
from commwatch.service.domain.records import KINDS
from commwatch.service.domain.steady import ranks_in_words
from commwatch.service.domain.wording import short_site

MAX_RANKS_NAMED = 16
MAX_STEPS_NAMED = 8
ALL_KINDS = (*CAPTURED_KINDS, *KINDS)
_TREE_OPTIONS = ("rank", "kinds", "module", "noise", "depth", "mesh")
_HEADERS = ("site", "phase", "kind", "group", "calls", "per rank", "payload", "module and cause")


@click.command()
@click.argument("run")
@click.option("--workload", metavar="NAME", help="Which workload, where several ran at that commit.")
@click.option("--step", type=click.IntRange(1), help="Print this captured step as a tree instead.")
@click.option("--rank", type=click.IntRange(0), help="Of this rank. Default: the lowest that captured the step.")
@click.option(
    "--kind", "kinds", multiple=True, metavar="KIND", type=click.Choice(ALL_KINDS), help="Only records of this kind."
)
@click.option("--module", metavar="GLOB", help="Only what ran in modules that match, or was issued for them.")
@click.option(
    "--noise",
    type=click.IntRange(0, 3),
    default=3,
    help="0: collectives. 1: and modules, redistributes, DTensor ops. 2: and all but trivial ops. 3: all, the default.",
)
@click.option("--depth", type=click.IntRange(1), help="Only so many levels of the tree.")
@click.option("--mesh", is_flag=True, help="Add the mesh of DTensors: DM(2, 2).")
@asks_service
def show(
    asking: Asking,
    run: str,
    workload: str | None,
    step: int | None,
    rank: int | None,
    kinds: tuple[str, ...],
    module: str | None,
    noise: int,
    depth: int | None,
    mesh: bool,
) -> int:
    """Say what RUN did: a run id, a commit, a branch, or BRANCH~N; prefixes will do.

    With --step, print what one rank ran in a captured step, as a tree in the shorthand of torch's DebugMode. --kind may
    be given several times: a kind of record (torch_function, dtensor_op, redistribute, output_placements, op, fake_op,
    local_tensor_op, async_op, triton_kernel, region, module, record_function, annotation) or of collective. Records
    above those that match are printed too. Trivial ops are detach, t, view, _to_copy, as_strided and transpose.
    """
    if step is None:
        _refuse_tree_options()
        found = with_git([run], lambda ref: asking.client.show(ref, workload=workload))
        asking.answer(found, lambda: _print(found))
        return EXIT_SAME
    wanted = Filter(frozenset(kinds), module, noise, depth)
    show_captured(asking, run, rank, step, wanted, mesh=mesh, workload=workload)
    return EXIT_SAME


def _refuse_tree_options() -> None:
    """Options of the tree mean nothing without one."""
    context = click.get_current_context()
    given = [name for name in _TREE_OPTIONS if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
    if given:
        option = f"--{given[0].removesuffix('s') if given[0] == 'kinds' else given[0]}"
        raise click.UsageError(f"{option} chooses records of a captured step: name the step with --step.")


def _print(found: forms.Report) -> None:
    run = found["run"]
    click.echo(printing.run_line(run))
    printing.labelled("id", run["id"])
    printing.labelled("workload", f"{run['workload']} of project {run['project']}, script {run['script'] or 'unknown'}")
    attempt = f", attempt {run['attempt']}" if run["attempt"] else ""
    reported = f"{len(found['ranks'])} of {run['expected_ranks']} ranks reported"
    printing.labelled("state", f"{run['state']}: {reported}, {run['steps']} steps, {run['calls']} calls{attempt}")
    _print_ranks(found["ranks"])
    printing.labelled("environment", _environment(run["environment"]))
    print_completeness(found["completeness"])
    print_cost(found["cost"], len(found["ranks"]))
    if found["captured"]:
        printing.labelled("captured", _captured(found["captured"]))
    if run["accepted"] is not None:
        printing.labelled("accepted", f"by {run['accepted']['author']}: {run['accepted']['reason']}")
    if found["compared"] is not None:
        verdict = found["compared"]["verdict"].replace("_", " ")
        printing.labelled("verdict", f"{verdict}. {found['compared']['reason']}")
    for alert in found["alerts"]:
        printing.labelled("alert", f"{alert['state']}: {alert['title']}")
    if found["steady"] is None:
        for reason in found["reasons"]:
            printing.labelled("no step", reason["message"])
        return
    _print_steady(found["steady"])


def _print_ranks(ranks: list[forms.Rank]) -> None:
    """Ranks that did not end well, or whose records are not whole."""
    odd = [rank for rank in ranks if rank["state"] in ("lost", "exception") or _lacks(rank)]
    for rank in odd[:MAX_RANKS_NAMED]:
        parts = [rank["state"] + (f" ({rank['detail']})" if rank["detail"] else ""), *_lacks(rank)]
        where = f"rank {rank['rank']} on {rank['hostname']}, pid {rank['pid']}"
        printing.labelled("", f"{where}: {', '.join(parts)}, after {rank['steps']} steps")
    if len(odd) > MAX_RANKS_NAMED:
        printing.labelled("", f"and {len(odd) - MAX_RANKS_NAMED} more; --json names them all")


def _lacks(rank: forms.Rank) -> list[str]:
    counted = {"dropped calls": rank["dropped_calls"], "dropped steps": rank["dropped_steps"]}
    counted["rejected records"] = rank["rejected_frames"]
    return [f"{number} {name}" for name, number in counted.items() if number]


def _captured(captured: list[forms.CapturedAt]) -> str:
    shown = [f"step {item['step']} of {ranks_in_words(item['ranks']).lower()}" for item in captured[:MAX_STEPS_NAMED]]
    more = f" and {len(captured) - MAX_STEPS_NAMED} more steps" if len(captured) > MAX_STEPS_NAMED else ""
    return f"{'; '.join(shown)}{more}; print one with --step"


def _environment(environment: forms.Environment | None) -> str:
    if environment is None:
        return "not reported yet"
    mesh = " x ".join(f"{dimension['name']}={dimension['size']}" for dimension in environment["mesh"])
    return (
        f"torch {environment['torch_version']}, {environment['backend']} on {environment['device_type']}, "
        f"{environment['world_size']} ranks, {f'mesh {mesh}' if mesh else 'no mesh'}, {environment['compile_mode']}"
    )


def _print_steady(steady: forms.Steady) -> None:
    classes = steady["classes"]
    kinds = "" if len(classes) == 1 else f", {len(classes)} kinds of ranks"
    steps = min(cls["steps"] for cls in classes)
    text = f"{steady['calls']} calls, {steady['payload']['text']} payload over all ranks; seen {steps} times{kinds}"
    printing.labelled("steady step", text)
    printing.left_out("left out", steady["left_out"])
    if not steady["sites"]:
        return
    click.echo()
    printing.table(
        _HEADERS,
        [_row(site) for site in steady["sites"]],
        right=("calls", "per rank", "payload"),
        fold="module and cause",
    )


def _row(site: forms.SteadySite) -> tuple[str, ...]:
    per_rank = str(site["max_calls"])
    if site["min_calls"] != site["max_calls"]:
        per_rank = f"{site['min_calls']}-{site['max_calls']}"
    group = site["group"]
    return (
        short_site(site["site"]),
        site["phase"],
        site["kind"],
        f"{group['name']}({group['size']})",
        str(site["calls"]),
        per_rank,
        site["payload"]["text"],
        _why(site),
    )


def _why(site: forms.SteadySite) -> str:
    module = site["module"] or "no module"
    if site["modules"] > 1:
        module += f" (x{site['modules']})"
    cause = site["cause"]
    parts = [module]
    if cause is not None:
        parts.append(f"{cause['src']} -> {cause['dst']}" + (f" by {cause['op']}" if cause["op"] else ""))
    if site["lines"]:
        parts.append(f"{site['lines'][0]['file']}:{site['lines'][0]['line']}")
    return ", ".join(parts)
