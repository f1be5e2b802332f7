"""``commwatch demo``: the whole way of the data on this machine, with a real job."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import click

from commwatch.client import Client
from commwatch.service.demo import processes, repository
from commwatch.service.demo.picture import save
from commwatch.service.domain.wording import short_site

EXIT_INFRASTRUCTURE = 4
WAIT_LIMIT_S = 60.0
POLL_S = 0.2


@click.command()
@click.option(
    "--steps", default=12, show_default=True, type=click.IntRange(6, 1000), help="Training steps of each run."
)
@click.option("--keep", type=click.Path(path_type=Path), help="Keep repository, database and logs in this new folder.")
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), help="Save the comparison as an SVG file.")
def demo(steps: int, keep: Path | None, picture: Path | None) -> None:
    """Train a small model on four real ranks at two commits, and catch the one that communicates more.

    The second commit changes one layout. Exits 0 when the alert was raised and the gate said 1.
    """
    if find_spec("torch") is None:
        click.echo("commwatch demo trains a model: install torch first, such as `pip install torch`", err=True)
        sys.exit(2)
    with ExitStack() as stack:
        if keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="commwatch-demo-")))
        else:
            keep.mkdir(parents=True)
            folder = keep.resolve()
        try:
            service = stack.enter_context(processes.service(folder))
            _run(folder, service, steps, Stages(), picture)
        except processes.DemoError as error:
            click.echo(f"commwatch demo: {error}", err=True)
            sys.exit(EXIT_INFRASTRUCTURE)
    _next(keep)


class Stages:
    """One line for each stage, with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        """Say what is being done now."""
        click.echo(f"[{time.monotonic() - self._start:5.1f} s] {text}")


def _run(folder: Path, service: processes.Service, steps: int, stage: Stages, picture: Path | None) -> None:
    stage(f"service ready at {service.http_url} (agents: {service.grpc_address})")
    checkout = folder / "job"
    good = repository.create(checkout)
    _train(folder, service, good, steps, stage, "good")
    changed = repository.change_layout(checkout)
    stage(f"changed one layout in model.py: {repository.GOOD} -> {repository.CHANGED}")
    _train(folder, service, changed, steps, stage, "changed")
    with Client(service.http_url) as client:
        _until(lambda: bool(client.alerts(state="open")["alerts"]), "no alert was raised")
    stage("alert raised")
    _show(service, checkout, "runs")
    code, output = _show(service, checkout, "compare", good[:8], changed[:8])
    if picture is not None:
        save(picture, f"compare {good[:8]} {changed[:8]}", output)
    _show(service, checkout, "alerts")
    code, _ = _show(service, checkout, "gate", "--base", good[:8], "--head", changed[:8])
    if code != 1:
        raise processes.DemoError(f"the gate ended with exit code {code}: expected 1")
    code, _ = _show(service, checkout, "explain", changed[:8], _worst_site(service, good, changed))
    if code != 0:
        raise processes.DemoError(f"explaining a change ended with exit code {code}: expected 0")
    step = str(processes.CAPTURED_STEP)
    code, _ = _show(service, checkout, "show", changed[:8], "--step", step, "--noise", "0", "--module", "layers.0.wo")
    if code != 0:
        raise processes.DemoError(f"showing a captured step ended with exit code {code}: expected 0")


def _worst_site(service: processes.Service, good: str, changed: str) -> str:
    """The site of the first change, which is the most severe."""
    with Client(service.http_url) as client:
        changes = client.compare(good, changed)["changes"]
    if not changes:
        raise processes.DemoError("the comparison has no change")
    return short_site(changes[0]["site"])


def _train(folder: Path, service: processes.Service, commit: str, steps: int, stage: Stages, name: str) -> None:
    stage(f"training at {commit[:8]} ({name}): COMMWATCH_ENDPOINT={service.grpc_address} torchrun ... train.py")
    lines: list[str] = []
    processes.train(folder / "job", service.grpc_address, folder / f"{name}.log", steps, lines.append)
    stage(lines[-1] if lines else "trained")
    with Client(service.http_url) as client:
        _until(
            lambda: any(run["state"] == "complete" for run in client.runs(commit=commit)["runs"]),
            f"the run at {commit[:8]} did not become complete",
        )


def _until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise processes.DemoError(f"{otherwise} within {WAIT_LIMIT_S:.0f} s")
        time.sleep(POLL_S)


def _show(service: processes.Service, checkout: Path, *arguments: str) -> tuple[int, str]:
    click.echo(f"\n$ commwatch {' '.join(arguments)}")
    code, output = processes.command(service.http_url, checkout, *arguments)
    click.echo(output)
    return code, output


def _next(keep: Path | None) -> None:
    if keep is not None:
        click.echo(f"\nKept in {keep}: job/ (the repository), commwatch.db, logs.")
    click.echo(
        "\nWhat to run next:\n"
        "  commwatch serve                                        # your own service\n"
        "  COMMWATCH_ENDPOINT=127.0.0.1:8431 torchrun train.py    # your own job, unchanged\n"
        "  commwatch runs                                         # what it recorded\n"
        "  commwatch gate --base main --head BRANCH               # in CI"
    )
