"""Why a call of a stored run is there, and what was captured of the run."""

from __future__ import annotations

from dataclasses import dataclass

from commwatch.service.domain.captures import CapturedStep, CaptureSummary
from commwatch.service.domain.explaining import (
    Link,
    TreePath,
    chain,
    find_in_capture,
    matching_sites,
    remedy,
    site_in_words,
)
from commwatch.service.domain.runs import Run
from commwatch.service.domain.sites import Site
from commwatch.service.domain.steady import NotSteady, ranks_in_words
from commwatch.service.domain.steady_run import SteadySite
from commwatch.service.domain.wording import short_id, short_site
from commwatch.service.store.contract import Store
from commwatch.service.verdicts.reading import load_steady
from commwatch.service.verdicts.refs import AmbiguousRefError, UnknownRefError

MAX_CAPTURES_READ = 4
"""Captures in which a site is looked for."""
MAX_NAMED = 8
"""Sites or captures that one error names."""

EXAMPLE_STEPS = "3,100:102"


class UnknownSiteError(UnknownRefError):
    """The run has no such site."""


class AmbiguousSiteError(AmbiguousRefError):
    """Several sites of the run have that name."""


class UnknownCaptureError(UnknownRefError):
    """That step of that rank was not captured."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The chain behind a site, what usually helps (empty where that is not clear), and where a capture shows it."""

    run: Run
    site: SteadySite
    chain: tuple[Link, ...]
    remedy: str
    path: TreePath | None


def explain(store: Store, run: Run, text: str) -> Explanation:
    """Explain the site a text stands for. Raises UnknownSiteError and AmbiguousSiteError."""
    try:
        site = _find_site(store, run, text)
    except (UnknownSiteError, AmbiguousSiteError) as error:
        error.ref = text
        raise
    return Explanation(run, site, chain(site), remedy(site.site), _find_path(store, run, site.site))


def captured_step(store: Store, run: Run, rank: int, step: int) -> CapturedStep:
    """One captured step. Raises UnknownCaptureError, which names those that are stored and how to get one."""
    found = store.capture(run.id, rank, step)
    if found is None:
        raise _no_capture(run, store.captures(run.id), f"step {step} of rank {rank}")
    return found


def _no_capture(run: Run, summaries: list[CaptureSummary], what: str) -> UnknownCaptureError:
    """What to say where something was not captured."""
    by_step: dict[int, list[int]] = {}
    for summary in summaries:
        by_step.setdefault(summary.step, []).append(summary.rank)
    named = [f"step {step} of {ranks_in_words(ranks).lower()}" for step, ranks in list(by_step.items())[:MAX_NAMED]]
    more = f" and {len(by_step) - MAX_NAMED} more steps" if len(by_step) > MAX_NAMED else ""
    stored = f"Captured: {'; '.join(named)}{more}." if named else "Nothing was captured."
    live = f"type `commwatch capture {short_id(run.id)}` now"
    other = live if run.state == "running" else "ask one that runs with `commwatch capture RUN`"
    error = UnknownCaptureError(
        f"Run {short_id(run.id)} has no capture of {what}. {stored} "
        f"To get one, start the job with COMMWATCH_CAPTURE_STEPS={EXAMPLE_STEPS}, or {other}."
    )
    error.ref = run.id
    return error


def _find_site(store: Store, run: Run, text: str) -> SteadySite:
    steady = load_steady(store, run)
    if isinstance(steady, NotSteady):
        why = " ".join(reason.message for reason in steady.reasons)
        raise UnknownSiteError(f"Run {short_id(run.id)} has no steady step, and so no sites: {why}")
    found = matching_sites(steady.sites, text)
    if len(found) == 1:
        return found[0]
    ids = [short_site(site.site.hash) for site in found]
    if not found:
        raise UnknownSiteError(
            f"Run {short_id(run.id)} has no site {text!r}: name one by the id that `commwatch show {short_id(run.id)}` "
            "prints, or as MODULE or KIND:MODULE."
        )
    named = ", ".join(site_in_words(site.site) for site in found[:MAX_NAMED])
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    raise AmbiguousSiteError(f"{text} stands for {len(found)} sites: {named}{more}. Name one by its id.", ids)


def _find_path(store: Store, run: Run, site: Site) -> TreePath | None:
    with_calls = [summary for summary in store.captures(run.id) if summary.collectives]
    for summary in with_calls[:MAX_CAPTURES_READ]:
        captured = store.capture(run.id, summary.rank, summary.step)
        path = None if captured is None else find_in_capture(captured, site)
        if path is not None:
            return path
    return None
