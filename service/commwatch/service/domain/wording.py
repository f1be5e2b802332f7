"""Changes and numbers in words: the same sentence in alerts, comparisons and the gate."""

from __future__ import annotations

from fractions import Fraction

from commwatch.service.domain.changes import Change
from commwatch.service.domain.completeness import RecordingCost
from commwatch.service.domain.policy import PayloadGrowth
from commwatch.service.domain.records import Cause
from commwatch.service.domain.runs import Run
from commwatch.service.domain.steady_run import Payload


def bytes_in_words(count: Fraction | int) -> str:
    """Three significant digits at most, in decimal units: ``512 B``, ``1.5 kB``, ``12.3 MB``, ``2.1 GB``."""
    size = abs(Fraction(count))
    sign = "-" if count < 0 else ""
    if size < 1000:
        return f"{sign}{round(size)} B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        size /= 1000
        rounded = round(size, 1) if size < 100 else round(size)
        if rounded < 1000 or unit == "PB":
            return f"{sign}{_decimal(Fraction(rounded))} {unit}"
    raise AssertionError("the last unit takes every size")


def payload_in_words(payload: Payload) -> str:
    """``1.5 kB``, ``~1.5 kB`` for a mean over steps that vary, ``unknown`` when withheld."""
    if payload.per_step is None:
        return "unknown"
    return f"{'~' if payload.varies else ''}{bytes_in_words(payload.per_step)}"


def sentence(change: Change) -> str:
    """What changed, where and why, in one sentence without an end mark."""
    site = change.site
    amount = _payload_amount(change) if change.change == "bytes" else _amount(change)
    counts = f" ({'; '.join(_counts(change))})" if change.change == "count" else ""
    reason = _reason(site.cause, change)
    return f"{amount} {_module(site.module)}, {site.phase}{counts}{reason}"


def effect(change: Change) -> str:
    """What it costs a step, summed over ranks: ``+8 calls, +2.1 MB payload per step over 4 ranks``."""
    parts = [f"{_signed(change.delta_calls)} calls"] if change.delta_calls else []
    if change.delta_bytes is None:
        parts.append("payload varies or is unknown")
    else:
        parts.append(f"{_signed_bytes(change.delta_bytes)} payload")
    ranks = change.ranks or change.of_ranks
    return f"{', '.join(parts)} per step over {ranks} rank{'s' if ranks > 1 else ''}"


def payload_sentence(growth: PayloadGrowth) -> str:
    """The payload of a whole step in both runs."""
    both = f"{payload_in_words(growth.base)} -> {payload_in_words(growth.head)} over all ranks"
    if growth.unexplained is None or growth.base.exact is None or growth.head.exact is None:
        return f"payload per step: {both}"
    delta = growth.head.exact - growth.base.exact
    if delta == 0:
        return f"payload per step unchanged: {payload_in_words(growth.base)} over all ranks"
    return f"{_signed_bytes(delta)} payload per step{_percent(delta, growth.base.exact)}: {both}"


def short_id(run_id: str) -> str:
    """The first 13 characters: all of the clock of a UUID of version 7. Eight are equal for a whole minute."""
    return run_id[:13]


def short_site(site_hash: str) -> str:
    """The first 8 characters of a site's hash: enough to name it in one run."""
    return site_hash[:8]


def cost_in_words(cost: RecordingCost) -> str:
    """``0.21 ms a step, 1.2 % of the step``."""
    percent = Fraction(round(100 * cost.part_of_step, 1))
    return f"{_two_digits(cost.ns_per_step / 1_000_000)} ms a step, {_decimal(percent)} % of the step"


def run_in_words(run: Run) -> str:
    """``run 0192f3a1-b2c3 at 4be1c9d2 (main), dirty tree``."""
    at = f" at {run.commit_sha[:8]}" if run.commit_sha else " at an unknown commit"
    branch = f" ({run.branch})" if run.branch else ""
    return f"run {short_id(run.id)}{at}{branch}{', dirty tree' if run.dirty else ''}"


def _amount(change: Change) -> str:
    kind = change.site.kind
    on = f" on {change.ranks} of {change.of_ranks} ranks" if change.ranks < change.of_ranks else ""
    if change.delta_per_layer is not None:
        return f"{_signed(change.delta_per_layer)} {kind} per layer (x{change.layers}){on}"
    if change.delta_per_rank is not None:
        return f"{_signed(change.delta_per_rank)} {kind}{on}"
    if change.delta_calls == 0:
        return f"{kind} moved between ranks"
    return f"{_signed(change.delta_calls)} {kind} summed over {change.ranks} ranks"


def _payload_amount(change: Change) -> str:
    delta = change.delta_bytes or 0
    percent = _percent(delta, change.base_payload.exact or 0)
    return f"{_signed_bytes(delta)} payload per step{percent} of {change.site.kind}"


def _counts(change: Change) -> list[str]:
    parts = [f"{change.base_calls} -> {change.head_calls} calls per step"]
    if change.base_modules != change.head_modules:
        parts.append(f"{change.base_modules} -> {change.head_modules} modules call it")
    if change.base_instances != change.head_instances and change.base_instances and change.head_instances:
        parts.append(f"{change.base_instances} -> {change.head_instances} such modules")
    return parts


def _module(module: str) -> str:
    if not module:
        return "outside of any module"
    return "in the root module" if module == "(root)" else f"in {module}"


def _reason(cause: Cause | None, change: Change) -> str:
    at = f" at {change.lines[0].file}:{change.lines[0].line}" if change.lines else ""
    if cause is None:
        return f",{at}" if at else ""
    asked = f" asked by {cause.op}" if cause.op else ""
    return f": {'implicit' if cause.implicit else 'explicit'} redistribute {cause.src} -> {cause.dst}{asked}{at}"


def _signed(number: int) -> str:
    return f"{number:+d}"


def _signed_bytes(count: int) -> str:
    return f"{'+' if count >= 0 else ''}{bytes_in_words(count)}"


def _percent(delta: int, base: int) -> str:
    if not base:
        return ""
    percent = round(Fraction(100 * delta, base), 1)
    return f" ({'+' if percent >= 0 else '-'}{_decimal(abs(percent))} %)"


def _two_digits(value: Fraction) -> str:
    """A non-negative number with two significant digits at least, and at most three decimal places."""
    places = 1 if value >= 10 else 2 if value >= Fraction(1, 10) else 3
    return f"{float(round(value, places)):.{places}f}"


def _decimal(value: Fraction) -> str:
    """A non-negative number with at most one decimal place."""
    tenths = round(value * 10)
    return f"{tenths // 10}.{tenths % 10}" if tenths % 10 else f"{tenths // 10}"
