"""Which changes matter. The default policy, and the verdict it gives."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from commwatch.service.domain.changes import Change, Comparison
from commwatch.service.domain.steady_run import Payload, add_payloads

SEVERITIES = ("alert", "warn", "info")
VERDICTS = ("same", "changed", "regression", "no_verdict")
"""same: no change. changed: changes, none of which fails. regression: one alerts. no_verdict: not comparable."""

ALERTING_KINDS = frozenset({"all_gather", "reduce_scatter"})
"""More calls of these alert; more calls of another kind warn."""

PAYLOAD_GROWTH_LIMIT = Fraction(5, 100)
"""Payload bytes per step may grow by this part of the base run's before the growth alerts."""


@dataclass(frozen=True, slots=True)
class JudgedChange:
    """A change and how much it matters."""

    change: Change
    severity: str


@dataclass(frozen=True, slots=True)
class PayloadGrowth:
    """Payload bytes of a whole step in both runs.

    ``unexplained`` are the bytes that came beside those of alerting changes and of more layers: what the limit
    is applied to. None when a side is withheld or varies.
    """

    base: Payload
    head: Payload
    unexplained: Fraction | None
    severity: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """Every change with its severity: the most severe first, then those of implicit redistributes."""

    changes: tuple[JudgedChange, ...]
    payload: PayloadGrowth

    def verdict(self, *, strict: bool = False) -> str:
        """One of VERDICTS. With ``strict``, a warning fails too."""
        severities = {judged.severity for judged in self.changes} | {self.payload.severity}
        if "alert" in severities or (strict and "warn" in severities):
            return "regression"
        return "changed" if self.changes else "same"


def judge(comparison: Comparison) -> Judgement:
    """Apply the default policy: fewer calls and moved bytes are information, more calls warn or alert."""
    judged = [JudgedChange(change, _severity(change)) for change in comparison.changes]
    judged.sort(key=lambda found: (SEVERITIES.index(found.severity), not _implicit(found.change)))
    return Judgement(tuple(judged), _payload_growth(comparison, judged))


def _implicit(change: Change) -> bool:
    """Whether nobody asked for it in so many words: what readers want to see first."""
    return change.site.cause is not None and change.site.cause.implicit


def _severity(change: Change) -> str:
    if change.delta_calls <= 0:
        return "info"
    return "alert" if change.site.kind in ALERTING_KINDS else "warn"


def _payload_growth(comparison: Comparison, judged: list[JudgedChange]) -> PayloadGrowth:
    base = add_payloads([site.payload for site in comparison.base.sites])
    head = add_payloads([site.payload for site in comparison.head.sites])
    if base.exact is None or head.exact is None:
        return PayloadGrowth(base, head, None, "info")
    growth = Fraction(head.exact - base.exact)
    for found in judged:
        if found.severity == "alert":
            growth -= found.change.delta_bytes or 0
    for change in comparison.scaled:
        # More layers explain bytes in proportion to their calls; what each call grew by is not explained.
        growth -= (change.base_payload.exact or 0) * Fraction(change.delta_calls, change.base_calls)
    exceeded = growth > 0 and growth > PAYLOAD_GROWTH_LIMIT * base.exact
    return PayloadGrowth(base, head, growth, "alert" if exceeded else "info")
