"""Runs, ranks and step ranges as readers see them: always of the newest attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, and_, func, select

from commwatch.service.domain.records import Completeness, Facts, MeshDimension, StepRange
from commwatch.service.domain.runs import Environment, Rank, RankRanges, Run
from commwatch.service.store import codec
from commwatch.service.store.completeness import read_completeness
from commwatch.service.store.schema import (
    alert_runs,
    alerts,
    baselines,
    commits,
    projects,
    ranks,
    runs,
    step_ranges,
    workloads,
)

_OF_NEWEST_ATTEMPT = and_(ranks.c.run_id == runs.c.id, ranks.c.attempt == runs.c.attempt)


def read_runs(connection: Connection, where: Sequence[ColumnElement[bool]], limit: int, offset: int) -> list[Run]:
    """Runs that match every condition over ``runs``, ``projects`` and ``workloads``, newest first."""
    statement = _select_runs().where(*where).order_by(runs.c.started_unix_ns.desc(), runs.c.id.desc())
    rows = connection.execute(statement.limit(limit).offset(offset)).mappings().all()
    ids = [row["id"] for row in rows]
    counters = _counters(connection, ids)
    environments = _environments(connection, ids, {row["id"]: row["world_size"] for row in rows})
    showing = _open_alerts(connection, ids)
    return [
        Run(
            **row,
            environment=environments.get(row["id"]),
            steps=counters.get(row["id"], (0, 0))[0],
            calls=counters.get(row["id"], (0, 0))[1],
            open_alerts=showing.get(row["id"], 0),
        )
        for row in rows
    ]


def run_ids(connection: Connection, prefix: str, limit: int) -> list[str]:
    """Ids that start with prefix, newest first."""
    statement = (
        select(runs.c.id)
        .where(runs.c.id.startswith(prefix.lower(), autoescape=True))
        .order_by(runs.c.started_unix_ns.desc(), runs.c.id.desc())
        .limit(limit)
    )
    return list(connection.scalars(statement))


def read_ranks(connection: Connection, run_id: str) -> list[Rank]:
    """Ranks, by rank."""
    stored = (
        select(func.coalesce(func.sum(step_ranges.c.steps), 0))
        .where(
            step_ranges.c.run_id == ranks.c.run_id,
            step_ranges.c.attempt == ranks.c.attempt,
            step_ranges.c.rank == ranks.c.rank,
            ~step_ranges.c.unfinished,
        )
        .correlate(ranks)
        .scalar_subquery()
        .label("stored_steps")
    )
    statement = (
        select(ranks, stored).join(runs, _OF_NEWEST_ATTEMPT).where(ranks.c.run_id == run_id).order_by(ranks.c.rank)
    )
    completeness = read_completeness(connection, run_id)
    return [_rank(row, completeness.get(row["rank"])) for row in connection.execute(statement).mappings()]


def read_ranges(connection: Connection, run_id: str) -> list[RankRanges]:
    """Step ranges, by rank and number."""
    known = select(ranks.c.rank).join(runs, _OF_NEWEST_ATTEMPT).where(ranks.c.run_id == run_id).order_by(ranks.c.rank)
    by_rank: dict[int, list[StepRange]] = {rank: [] for rank in connection.scalars(known)}
    statement = (
        select(step_ranges)
        .join(runs, and_(step_ranges.c.run_id == runs.c.id, step_ranges.c.attempt == runs.c.attempt))
        .where(step_ranges.c.run_id == run_id)
        .order_by(step_ranges.c.rank, step_ranges.c.number)
    )
    for row in connection.execute(statement).mappings():
        by_rank[row["rank"]].append(_range(row))
    return [RankRanges(rank, tuple(ranges)) for rank, ranges in by_rank.items()]


def _select_runs() -> Select[tuple[object, ...]]:
    own = ("commit_sha", "branch", "dirty", "script", "state", "attempt", "world_size", "reporting_ranks")
    times = ("started_unix_ns", "last_seen_unix_ns", "ended_unix_ns")
    return (
        select(
            runs.c.id,
            projects.c.name.label("project"),
            workloads.c.name.label("workload"),
            func.coalesce(commits.c.subject, "").label("commit_subject"),
            *(runs.c[name] for name in own + times),
            baselines.c.reason.label("accepted_reason"),
            baselines.c.author.label("accepted_by"),
            baselines.c.accepted_unix_ns,
        )
        .join(projects, projects.c.id == runs.c.project_id)
        .join(workloads, workloads.c.id == runs.c.workload_id)
        .outerjoin(commits, and_(commits.c.project_id == runs.c.project_id, commits.c.sha == runs.c.commit_sha))
        .outerjoin(baselines, baselines.c.run_id == runs.c.id)
    )


def _counters(connection: Connection, ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """By run: steps of the rank that is furthest, and calls of all ranks."""
    statement = (
        select(ranks.c.run_id, func.max(ranks.c.steps), func.sum(ranks.c.calls))
        .join(runs, _OF_NEWEST_ATTEMPT)
        .where(ranks.c.run_id.in_(ids))
        .group_by(ranks.c.run_id)
    )
    return {run_id: (int(steps), int(calls)) for run_id, steps, calls in connection.execute(statement)}


def _environments(connection: Connection, ids: Sequence[str], world_sizes: dict[str, int]) -> dict[str, Environment]:
    """Merged over ranks: the largest mesh, every distinct version joined by "+", "compile" when any rank compiled."""
    columns = (ranks.c.torch_version, ranks.c.mesh, ranks.c.device_type, ranks.c.backend, ranks.c.compile_mode)
    statement = (
        select(ranks.c.run_id, *columns)
        .distinct()
        .join(runs, _OF_NEWEST_ATTEMPT)
        .where(ranks.c.run_id.in_(ids), ranks.c.device_type.is_not(None))
    )
    by_run: dict[str, list[RowMapping]] = {}
    for row in connection.execute(statement).mappings():
        by_run.setdefault(row["run_id"], []).append(row)
    return {
        run_id: Environment(
            torch_version=_joined(row["torch_version"] for row in rows),
            backend=_joined(row["backend"] for row in rows),
            device_type=_joined(row["device_type"] for row in rows),
            world_size=world_sizes[run_id],
            mesh=_largest([codec.decode_mesh(row["mesh"]) for row in rows]),
            compile_mode="compile" if any(row["compile_mode"] == "compile" for row in rows) else "eager",
        )
        for run_id, rows in by_run.items()
    }


def _joined(values: Iterable[str]) -> str:
    parts = {part for value in values for part in value.split("+") if part}
    return "+".join(sorted(parts))


def _largest(meshes: list[tuple[MeshDimension, ...]]) -> tuple[MeshDimension, ...]:
    def order(mesh: tuple[MeshDimension, ...]) -> tuple[int, list[tuple[str, int]]]:
        size = 1 if mesh else 0
        for dimension in mesh:
            size *= dimension.size
        # Names decide between equal sizes, so that the answer does not hang on the order of the rows.
        return -size, [(dimension.name, dimension.size) for dimension in mesh]

    return min(meshes, key=order)


def _open_alerts(connection: Connection, ids: Sequence[str]) -> dict[str, int]:
    statement = (
        select(alert_runs.c.run_id, func.count())
        .join(alerts, alerts.c.id == alert_runs.c.alert_id)
        .where(alert_runs.c.run_id.in_(ids), alerts.c.state == "open")
        .group_by(alert_runs.c.run_id)
    )
    return {row[0]: row[1] for row in connection.execute(statement)}


def _rank(values: RowMapping, completeness: Completeness | None) -> Rank:
    facts = None
    if values["device_type"] is not None:
        kinds = (values["device_type"], values["backend"], values["compile_mode"], values["modules_hash"])
        facts = Facts(codec.decode_mesh(values["mesh"]), *kinds)
    reasons = [text for text in (values["detail"], values["drop_reason"]) if text]
    names = [name for name in Rank.__slots__ if name not in ("facts", "detail", "completeness")]
    told = {name: values[name] for name in names}
    return Rank(**told, detail="; ".join(reasons), facts=facts, completeness=completeness)


def _range(values: RowMapping) -> StepRange:
    names = [name for name in StepRange.__slots__ if name != "statistics"]
    return StepRange(**{name: values[name] for name in names}, statistics=codec.decode_statistics(values["statistics"]))
