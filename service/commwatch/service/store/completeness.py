"""What ranks recorded against what a second source counted."""

from __future__ import annotations

from sqlalchemy import Connection, and_, select

from commwatch.service.domain.records import Completeness, Group, GroupCompleteness
from commwatch.service.store.database import Database, insert_sql
from commwatch.service.store.schema import completeness, completeness_groups, runs

_UPSERT = (
    f"{insert_sql(completeness).removesuffix('NOTHING')}UPDATE SET step = excluded.step,"
    " unattributed = excluded.unattributed, unequal_steps = excluded.unequal_steps,"
    " first_unequal_step = excluded.first_unequal_step, graph_calls = excluded.graph_calls"
)
_CLEAR = "DELETE FROM completeness_groups WHERE run_id = ? AND attempt = ? AND rank = ?"
_INSERT_GROUP = insert_sql(completeness_groups)


class CompletenessWrites:
    """What one transaction stores: of each rank the newest."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, int, int], Completeness] = {}

    def add(self, key: tuple[str, int, int], found: Completeness) -> None:
        """It replaces what came before of that rank."""
        self._newest[key] = found

    def write(self, database: Database, connection: Connection) -> None:
        """Send the rows."""
        rows = [
            (*key, found.step, found.unattributed, found.unequal_steps, found.first_unequal_step, found.graph_calls)
            for key, found in self._newest.items()
        ]
        groups = [
            (
                *key,
                place,
                item.group.name,
                item.group.size,
                item.group.stride,
                item.recorded,
                item.expected,
                item.source,
            )
            for key, found in self._newest.items()
            for place, item in enumerate(found.groups)
        ]
        database.many(connection, _UPSERT, rows)
        database.many(connection, _CLEAR, list(self._newest))
        database.many(connection, _INSERT_GROUP, groups)


def read_completeness(connection: Connection, run_id: str) -> dict[int, Completeness]:
    """Of every rank of the newest attempt that reported it, by rank."""
    groups: dict[int, list[GroupCompleteness]] = {}
    of_newest = and_(completeness_groups.c.run_id == runs.c.id, completeness_groups.c.attempt == runs.c.attempt)
    statement = (
        select(completeness_groups)
        .join(runs, of_newest)
        .where(completeness_groups.c.run_id == run_id)
        .order_by(completeness_groups.c.rank, completeness_groups.c.place)
    )
    for row in connection.execute(statement):
        group = Group(row.group_name, row.group_size, row.group_stride)
        groups.setdefault(row.rank, []).append(GroupCompleteness(group, row.recorded, row.expected, row.source))
    statement = (
        select(completeness)
        .join(runs, and_(completeness.c.run_id == runs.c.id, completeness.c.attempt == runs.c.attempt))
        .where(completeness.c.run_id == run_id)
    )
    return {
        row.rank: Completeness(
            row.step,
            tuple(groups.get(row.rank, ())),
            row.unattributed,
            row.unequal_steps,
            row.first_unequal_step,
            row.graph_calls or 0,
        )
        for row in connection.execute(statement)
    }
