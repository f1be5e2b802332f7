"""Projects and workloads: names to ids."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select

from commwatch.service.store.ids import uuid7
from commwatch.service.store.schema import projects, workloads


def project_id(connection: Connection, name: str) -> str | None:
    """Id of a project; None when no run named it."""
    return connection.scalar(select(projects.c.id).where(projects.c.name == name))


def make_project(connection: Connection, name: str, now_unix_ns: int) -> str:
    """Id of a project, made when it is new."""
    found = project_id(connection, name)
    if found is None:
        found = uuid7(now_unix_ns)
        connection.execute(insert(projects).values(id=found, name=name))
    return found


def make_workload(connection: Connection, project: str, name: str, now_unix_ns: int) -> str:
    """Id of a project's workload, made when it is new."""
    this = (workloads.c.project_id == project) & (workloads.c.name == name)
    found = connection.scalar(select(workloads.c.id).where(this))
    if found is None:
        found = uuid7(now_unix_ns)
        connection.execute(insert(workloads).values(id=found, project_id=project, name=name))
    return found
