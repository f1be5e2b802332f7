"""Commits and their first-parent chains, as far as runs reported them."""

from __future__ import annotations

from sqlalchemy import Connection, func, literal, select

from commwatch.service.domain.records import Commit
from commwatch.service.store.database import Database
from commwatch.service.store.schema import commits, runs, workloads

# A chain reported from a shallow clone ends early: a longer one completes it, nothing shortens it.
_UPSERT = (
    "INSERT INTO commits (project_id, sha, first_parent_sha, subject) VALUES (?, ?, ?, ?)"
    " ON CONFLICT (project_id, sha) DO UPDATE SET"
    " first_parent_sha = COALESCE(commits.first_parent_sha, excluded.first_parent_sha),"
    " subject = CASE WHEN commits.subject = '' THEN excluded.subject ELSE commits.subject END"
)


def write_chain(database: Database, connection: Connection, project_id: str, commit: Commit) -> None:
    """Store a commit and its ancestors; nothing when the commit is unknown."""
    if not commit.sha:
        return
    chain = (commit.sha, *commit.ancestors)
    parents = (*commit.ancestors, None)
    rows = [
        (project_id, sha, parent, commit.subject if sha == commit.sha else "")
        for sha, parent in zip(chain, parents, strict=True)
    ]
    database.many(connection, _UPSERT, rows)


def first_parents(connection: Connection, project_id: str, sha: str, limit: int) -> list[str]:
    """Ancestors, nearest first, without the commit itself."""
    start = select(commits.c.first_parent_sha.label("sha"), literal(1).label("depth")).where(
        commits.c.project_id == project_id, commits.c.sha == sha, commits.c.first_parent_sha.is_not(None)
    )
    chain = start.cte("chain", recursive=True)
    step = (
        select(commits.c.first_parent_sha, chain.c.depth + 1)
        .join(chain, commits.c.sha == chain.c.sha)
        .where(commits.c.project_id == project_id, commits.c.first_parent_sha.is_not(None), chain.c.depth < limit)
    )
    chain = chain.union_all(step)
    return list(connection.scalars(select(chain.c.sha).order_by(chain.c.depth).limit(limit)))


def commit_shas(connection: Connection, project_id: str, prefix: str, limit: int) -> list[str]:
    """Full hashes that start with prefix, sorted."""
    statement = (
        select(commits.c.sha)
        .where(commits.c.project_id == project_id, commits.c.sha.startswith(prefix.lower(), autoescape=True))
        .order_by(commits.c.sha)
        .limit(limit)
    )
    return list(connection.scalars(statement))


def branch_heads(connection: Connection, project_id: str, branch: str) -> list[str]:
    """Commits of the newest runs of a branch, newest first, each once, at most 50."""
    newest = func.max(runs.c.started_unix_ns)
    statement = (
        select(runs.c.commit_sha)
        .where(runs.c.project_id == project_id, runs.c.branch == branch, runs.c.commit_sha != "")
        .group_by(runs.c.commit_sha)
        .order_by(newest.desc(), runs.c.commit_sha)
        .limit(50)
    )
    return list(connection.scalars(statement))


def names(connection: Connection, project_id: str) -> tuple[list[str], list[str]]:
    """All workloads and all branches, sorted."""
    known_workloads = connection.scalars(select(workloads.c.name).where(workloads.c.project_id == project_id))
    branches = connection.scalars(
        select(runs.c.branch).distinct().where(runs.c.project_id == project_id, runs.c.branch != "")
    )
    return sorted(known_workloads), sorted(branches)
