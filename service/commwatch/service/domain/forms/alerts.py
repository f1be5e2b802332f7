"""Alerts and their history."""

from __future__ import annotations

from collections.abc import Iterable

from commwatch.service.domain.alerts import Alert, AlertEvent
from commwatch.service.domain.forms.numbers import Form


def alert_to_json(alert: Alert, events: Iterable[AlertEvent] = ()) -> Form:
    """One alert; ``events`` oldest first."""
    return {
        "id": alert.id,
        "fingerprint": alert.fingerprint,
        "project": alert.project,
        "workload": alert.workload,
        "state": alert.state,
        "run": alert.run_id,
        "base_run": alert.base_run_id,
        "title": alert.title,
        "opened_unix_ns": alert.opened_unix_ns,
        "change": alert.change,
        "events": [
            {
                "unix_ns": event.at_unix_ns,
                "from": event.from_state,
                "to": event.to_state,
                "author": event.author,
                "reason": event.reason,
            }
            for event in events
        ],
    }
