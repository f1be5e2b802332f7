"""Differences between two runs."""

from __future__ import annotations

from dataclasses import dataclass

from commwatch.service.domain.records import Line
from commwatch.service.domain.sites import Site
from commwatch.service.domain.steady import Reason
from commwatch.service.domain.steady_run import Payload, SteadyRun

CHANGES = ("added", "removed", "count", "bytes")
"""added, removed: only the head or the base run has the site. count: both have it, with different numbers of calls.
bytes: equal calls, and different payload that is exact on both sides."""


@dataclass(frozen=True, slots=True)
class Change:
    """One site that differs. Calls and payload are per step, summed over ranks; a side without the site has zeros.

    ``ranks`` of the ``of_ranks`` ranks differ. ``delta_per_rank`` is given when it is the same on all that differ,
    ``delta_per_layer`` when each of their layers has the same part in it. ``base_modules`` and ``head_modules`` count
    distinct modules (layer numbers kept) that have the call; ``base_instances`` and ``head_instances`` the modules of
    that folded name, over all ranks, None when unknown. ``lines`` are those of the head run, of the base run where
    the site was removed.
    """

    change: str
    site: Site
    base_calls: int
    head_calls: int
    delta_per_rank: int | None
    delta_per_layer: int | None
    ranks: int
    of_ranks: int
    base_payload: Payload
    head_payload: Payload
    base_modules: int
    head_modules: int
    base_instances: int | None
    head_instances: int | None
    lines: tuple[Line, ...]

    @property
    def delta_calls(self) -> int:
        """Calls per step that came, over all ranks; negative when they went."""
        return self.head_calls - self.base_calls

    @property
    def delta_bytes(self) -> int | None:
        """Payload bytes per step that came, over all ranks; None unless exact on both sides."""
        base, head = self.base_payload.exact, self.head_payload.exact
        return None if base is None or head is None else head - base

    @property
    def layers(self) -> int:
        """Distinct modules that have the call, on the side that has more of them."""
        return max(self.base_modules, self.head_modules)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs that could be compared. ``scaled`` are sites that grew or shrank exactly with the number of layers."""

    base: SteadyRun
    head: SteadyRun
    changes: tuple[Change, ...]
    scaled: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class NoVerdict:
    """Two runs that cannot be compared, and every reason why."""

    reasons: tuple[Reason, ...]
