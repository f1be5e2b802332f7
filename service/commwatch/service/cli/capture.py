"""``commwatch capture``."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from commwatch.client import capture_forms
from commwatch.service.cli import printing
from commwatch.service.cli.asking import Asking, asker, asks_service, with_git
from commwatch.service.domain.captures import MAX_REQUEST_RANKS, MAX_REQUEST_STEPS

EXIT_CAPTURED = 0
EXIT_NOT_CAPTURED = 1
LOOK_EVERY_S = 0.5
MAX_WAIT_S = 86_400.0
_WAITING = ("asked", "sent")
_IN_WORDS = {"asked": "not sent to the rank yet", "sent": "sent to the rank", "captured": "captured"}


def _parse_ranks(_context: click.Context, _option: click.Parameter, value: str) -> list[int]:
    """``0,7`` or ``0-3,8``: the numbers, sorted, each once."""
    found: set[int] = set()
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise click.BadParameter(f"{value!r} is no list of ranks such as 0,7 or 0-3.")
        low, high = int(first), int(last or first)
        if high < low:
            raise click.BadParameter(f"{part.strip()} goes down: write it the other way round.")
        if high - low < MAX_REQUEST_RANKS:
            found |= set(range(low, high + 1))
        if high - low >= MAX_REQUEST_RANKS or len(found) > MAX_REQUEST_RANKS:
            raise click.BadParameter(f"{value!r} are more than {MAX_REQUEST_RANKS} ranks.")
    return sorted(found)


@click.command()
@click.argument("run")
@click.option(
    "--ranks",
    callback=_parse_ranks,
    default="0",
    metavar="LIST",
    help="Which, such as 0,7 or 0-3; at most 64. Default: 0.",
)
@click.option(
    "--steps", type=click.IntRange(1, MAX_REQUEST_STEPS), default=1, help="Steps of each rank, 1 to 16. Default: 1."
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0, MAX_WAIT_S),
    default=60.0,
    metavar="SECONDS",
    help="How long to wait for the records. Default: 60.",
)
@click.option("--no-wait", is_flag=True, help="Ask, and return at once.")
@click.option("--author", metavar="NAME", help="Who asks. Default: git's user.name, else the login.")
@click.option("--workload", metavar="NAME", help="Which workload, where several ran at that commit.")
@asks_service
def capture(
    asking: Asking,
    run: str,
    ranks: list[int],
    steps: int,
    wait_s: float,
    no_wait: bool,
    author: str | None,
    workload: str | None,
) -> int:
    """Ask ranks of RUN, which must be running, to record their next steps op by op, and wait for the records.

    A step is captured from its beginning, so records come after the step that runs now. Exits 0 when every rank
    captured what was asked for (with --no-wait: when all of them still run), and 1 when a rank refused, ended first,
    or did not answer in time.
    """
    who = author or asker()
    asked = with_git([run], lambda ref: asking.client.ask_captures(ref, ranks, steps, who, workload=workload))
    run_id, number = asked["run"]["id"], asked["requests"][0]["number"]
    found = asked["requests"] if no_wait else _wait(asking, run_id, asked["requests"], number, wait_s)
    answer: capture_forms.CaptureRequests = {**asked, "requests": found}
    asking.answer(answer, lambda: _print(answer))
    good = (*_WAITING, "captured") if no_wait else ("captured",)
    return EXIT_CAPTURED if all(request["state"] in good for request in found) else EXIT_NOT_CAPTURED


def _wait(
    asking: Asking, run_id: str, first: Sequence[capture_forms.CaptureRequest], number: int, wait_s: float
) -> list[capture_forms.CaptureRequest]:
    """The requests as they are when all are answered or the wait is over; progress goes to standard error."""
    deadline = time.monotonic() + wait_s
    found, told = list(first), dict[int, str]()
    while True:
        for request in found:
            state = _state(request)
            if told.get(request["rank"]) != state:
                told[request["rank"]] = state
                click.echo(f"rank {request['rank']}: {state}", err=True)
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not any(request["state"] in _WAITING for request in found):
            return found
        time.sleep(min(LOOK_EVERY_S, left_s))
        requests = asking.client.captures(run_id)["requests"]
        found = [request for request in requests if request["number"] == number]


def _state(request: capture_forms.CaptureRequest) -> str:
    words = _IN_WORDS.get(request["state"], f"{request['state']}: {request['reason']}")
    done = len(request["captured_steps"])
    return f"{words}, {done} of {request['steps']} steps" if done and request["state"] in _WAITING else words


def _print(answer: capture_forms.CaptureRequests) -> None:
    short = answer["run"]["short_id"]
    for request in answer["requests"]:
        label = f"rank {request['rank']}"
        if request["state"] != "captured":
            printing.labelled(label, _state(request))
        for step in request["captured_steps"]:
            printing.labelled(label, f"commwatch show {short} --step {step} --rank {request['rank']}")
    if any(request["state"] in _WAITING for request in answer["requests"]):
        number = answer["requests"][0]["number"]
        click.echo(f"Request {number} stays open; `commwatch show {short}` says what was captured.")
