"""What was decided about runs: baselines, comparisons and alerts."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, RowMapping, func, insert, select, update

from commwatch.service.domain.alerts import Alert, AlertEvent
from commwatch.service.store.contract import Baseline
from commwatch.service.store.schema import (
    alert_events,
    alert_runs,
    alerts,
    baselines,
    comparisons,
    projects,
    runs,
    workloads,
)

SERVICE = "commwatch"
"""Author of the transitions that nobody asked for."""


def accept(connection: Connection, run_id: str, reason: str, author: str, now_unix_ns: int) -> Baseline:
    """Make a run a baseline and accept the open alerts it shows. Raises KeyError for an unknown run."""
    workload_id = connection.scalar(select(runs.c.workload_id).where(runs.c.id == run_id))
    if workload_id is None:
        raise KeyError(run_id)
    row = connection.execute(select(baselines).where(baselines.c.run_id == run_id)).one_or_none()
    if row is not None:
        accepted = Baseline(run_id, row.reason, row.author, row.accepted_unix_ns)
    else:
        accepted = Baseline(run_id, reason, author, now_unix_ns)
        values = {"reason": reason, "author": author, "accepted_unix_ns": now_unix_ns}
        connection.execute(insert(baselines).values(run_id=run_id, workload_id=workload_id, **values))
    shown = (
        select(alerts.c.id)
        .join(alert_runs, alert_runs.c.alert_id == alerts.c.id)
        .where(alert_runs.c.run_id == run_id, alerts.c.state == "open")
    )
    for alert_id in connection.scalars(shown).all():
        connection.execute(update(alerts).where(alerts.c.id == alert_id).values(state="accepted"))
        _add_event(connection, alert_id, AlertEvent(now_unix_ns, "open", "accepted", author, reason))
    return accepted


def read_baselines(connection: Connection, project_id: str, workload: str) -> list[Baseline]:
    """Accepted runs of a workload, newest first."""
    statement = (
        select(baselines)
        .join(workloads, workloads.c.id == baselines.c.workload_id)
        .where(workloads.c.project_id == project_id, workloads.c.name == workload)
        .order_by(baselines.c.accepted_unix_ns.desc(), baselines.c.run_id.desc())
    )
    rows = connection.execute(statement)
    return [Baseline(row.run_id, row.reason, row.author, row.accepted_unix_ns) for row in rows]


def record_comparison(
    connection: Connection,
    head_run_id: str,
    base_run_id: str | None,
    verdict: str,
    reason: str,
    found: Sequence[Alert],
    now_unix_ns: int,
) -> list[Alert]:
    """Store a comparison and open what is new. Raises KeyError for an unknown run."""
    this = select(runs.c.project_id, runs.c.workload_id).where(runs.c.id == head_run_id)
    run = connection.execute(this).mappings().one_or_none()
    if run is None:
        raise KeyError(head_run_id)
    if compared(connection, head_run_id) != (base_run_id, verdict, reason):
        sequence = connection.scalar(
            select(func.coalesce(func.max(comparisons.c.sequence), 0) + 1).where(
                comparisons.c.head_run_id == head_run_id
            )
        )
        values = {"base_run_id": base_run_id, "verdict": verdict, "reason": reason, "at_unix_ns": now_unix_ns}
        connection.execute(insert(comparisons).values(head_run_id=head_run_id, sequence=sequence, **values))
    return [alert for alert in found if _open_alert(connection, alert, head_run_id, run, now_unix_ns)]


def compared(connection: Connection, head_run_id: str) -> tuple[str | None, str, str] | None:
    """(base run, verdict, reason) of the newest comparison."""
    row = connection.execute(
        select(comparisons.c.base_run_id, comparisons.c.verdict, comparisons.c.reason)
        .where(comparisons.c.head_run_id == head_run_id)
        .order_by(comparisons.c.sequence.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None else (row.base_run_id, row.verdict, row.reason)


def read_alerts(connection: Connection, where: Sequence[ColumnElement[bool]], limit: int) -> list[Alert]:
    """Alerts that match every condition over ``alerts`` and ``projects``, newest first."""
    names = [name for name in Alert.__slots__ if name not in ("project", "workload", "change")]
    statement = (
        select(
            *(alerts.c[name] for name in names),
            alerts.c.change,
            projects.c.name.label("project"),
            workloads.c.name.label("workload"),
        )
        .join(projects, projects.c.id == alerts.c.project_id)
        .join(workloads, workloads.c.id == alerts.c.workload_id)
        .where(*where)
        .order_by(alerts.c.opened_unix_ns.desc(), alerts.c.id.desc())
        .limit(limit)
    )
    return [Alert(**{**row, "change": json.loads(row["change"])}) for row in connection.execute(statement).mappings()]


def shown_by(run_id: str) -> ColumnElement[bool]:
    """Condition over ``alerts``: the run showed it."""
    return alerts.c.id.in_(select(alert_runs.c.alert_id).where(alert_runs.c.run_id == run_id))


def read_events(connection: Connection, alert_id: str) -> list[AlertEvent]:
    """History of one alert, oldest first."""
    statement = select(alert_events).where(alert_events.c.alert_id == alert_id).order_by(alert_events.c.sequence)
    return [
        AlertEvent(row.at_unix_ns, row.from_state, row.to_state, row.author, row.reason)
        for row in connection.execute(statement)
    ]


def _open_alert(connection: Connection, alert: Alert, head_run_id: str, run: RowMapping, now_unix_ns: int) -> bool:
    same = (alerts.c.workload_id == run["workload_id"]) & (alerts.c.fingerprint == alert.fingerprint)
    if connection.scalar(select(alerts.c.id).where(same, shown_by(head_run_id)).limit(1)) is not None:
        return False
    already_open = connection.scalar(select(alerts.c.id).where(same, alerts.c.state == "open"))
    if already_open is None:
        values = {
            "id": alert.id,
            "project_id": run["project_id"],
            "workload_id": run["workload_id"],
            "fingerprint": alert.fingerprint,
            "state": "open",
            "run_id": alert.run_id,
            "base_run_id": alert.base_run_id,
            "title": alert.title,
            "change": json.dumps(alert.change, separators=(",", ":"), sort_keys=True),
            "opened_unix_ns": alert.opened_unix_ns,
        }
        connection.execute(insert(alerts).values(values))
        _add_event(connection, alert.id, AlertEvent(now_unix_ns, "", "open", SERVICE, alert.title))
    connection.execute(insert(alert_runs).values(alert_id=already_open or alert.id, run_id=head_run_id))
    return already_open is None


def _add_event(connection: Connection, alert_id: str, event: AlertEvent) -> None:
    last = connection.scalar(select(func.max(alert_events.c.sequence)).where(alert_events.c.alert_id == alert_id))
    values = {
        "at_unix_ns": event.at_unix_ns,
        "from_state": event.from_state,
        "to_state": event.to_state,
        "author": event.author,
        "reason": event.reason,
    }
    connection.execute(insert(alert_events).values(alert_id=alert_id, sequence=(last or 0) + 1, **values))
