"""Unexpected changes that somebody should look at."""

from __future__ import annotations

from dataclasses import dataclass

ALERT_STATES = ("open", "accepted", "resolved")


@dataclass(frozen=True, slots=True)
class Alert:
    """One unexpected change, whatever the number of ranks and layers it shows on.

    ``fingerprint`` is ``v1:`` and a hash over site, kind of change and group: not over counts, lines, ranks or commits.
    ``change`` is the JSON form of the change (``forms.comparisons.change_to_json``). ``id`` is a UUID.
    """

    id: str
    fingerprint: str
    project: str
    workload: str
    state: str
    run_id: str
    base_run_id: str
    title: str
    change: dict[str, object]
    opened_unix_ns: int


@dataclass(frozen=True, slots=True)
class AlertEvent:
    """One transition of an alert."""

    at_unix_ns: int
    from_state: str
    to_state: str
    author: str
    reason: str
