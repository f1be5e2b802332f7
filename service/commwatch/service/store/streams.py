"""Writing what ranks report: hello, frames, progress, goodbye, and silence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, select, tuple_, update

from commwatch.service.domain.captures import Capture
from commwatch.service.domain.records import Completeness, Facts, Frame, Hello, Progress, RankKey, StepRange
from commwatch.service.store import codec
from commwatch.service.store.captures import CaptureWrites
from commwatch.service.store.commits import write_chain
from commwatch.service.store.completeness import CompletenessWrites
from commwatch.service.store.contract import RejectedFrame, StreamWrite
from commwatch.service.store.database import Database, insert_sql
from commwatch.service.store.definitions import write_definitions
from commwatch.service.store.projects import make_project, make_workload
from commwatch.service.store.run_states import settle, settle_incomplete
from commwatch.service.store.schema import ranks, rejections, runs, step_ranges

_RANK_AT_HELLO = (
    "run_id",
    "attempt",
    "rank",
    "hostname",
    "pid",
    "torch_version",
    "agent_version",
    "state",
    "detail",
    "acked_frame",
    "steps",
    "calls",
    "dropped_calls",
    "dropped_steps",
    "drop_reason",
    "rejected_frames",
    "started_unix_ns",
    "last_seen_unix_ns",
)
_INSERT_RANK = insert_sql(ranks, *_RANK_AT_HELLO)
_UPDATE_RANK = (
    "UPDATE ranks SET state = ?, detail = ?, acked_frame = ?, steps = ?, calls = ?, dropped_calls = ?,"
    " dropped_steps = ?, drop_reason = ?, rejected_frames = ?, expected_calls = ?, unverified_calls = ?,"
    " unattributed_calls = ?, recording_ns = ?, elapsed_ns = ?, last_seen_unix_ns = ?"
    " WHERE run_id = ? AND attempt = ? AND rank = ?"
)
_UPDATE_FACTS = (
    "UPDATE ranks SET mesh = ?, device_type = ?, backend = ?, compile_mode = ?, modules_hash = ?"
    " WHERE run_id = ? AND attempt = ? AND rank = ?"
)
# A resent range may be older than the progress that was stored in between: steps only grow.
_UPSERT_RANGE = (
    f"{insert_sql(step_ranges).removesuffix('NOTHING')}UPDATE SET first_step = excluded.first_step,"
    " last_step = CASE WHEN excluded.last_step > step_ranges.last_step"
    " THEN excluded.last_step ELSE step_ranges.last_step END,"
    " steps = CASE WHEN excluded.steps > step_ranges.steps THEN excluded.steps ELSE step_ranges.steps END,"
    " pattern_hash = excluded.pattern_hash, shapes_hash = excluded.shapes_hash, lines_hash = excluded.lines_hash,"
    " statistics = excluded.statistics, statistics_steps = excluded.statistics_steps,"
    " unfinished = excluded.unfinished"
)
_GROW_RANGE = (
    "UPDATE step_ranges SET last_step = CASE WHEN ? > last_step THEN ? ELSE last_step END,"
    " steps = CASE WHEN ? > steps THEN ? ELSE steps END"
    " WHERE run_id = ? AND attempt = ? AND rank = ? AND number = ? AND NOT unfinished"
)
# Null until an agent that knows them reported one.
_LATER_COUNTERS = ("expected_calls", "unverified_calls", "unattributed_calls", "recording_ns", "elapsed_ns")
_INSERT_RUN = insert_sql(runs)
_INSERT_REJECTION = insert_sql(rejections)
_TOUCH_RUN = "UPDATE runs SET last_seen_unix_ns = ? WHERE id = ? AND last_seen_unix_ns < ?"


def open_stream(database: Database, connection: Connection, hello: Hello, now_unix_ns: int) -> int:
    """Register whatever is new. Returns the cursor. Raises ValueError when the run is another project's."""
    project_id = make_project(connection, hello.project, now_unix_ns)
    key = hello.key
    run = connection.execute(select(runs).where(runs.c.id == key.run_id).with_for_update()).one_or_none()
    if run is None:
        workload_id = make_workload(connection, project_id, hello.workload, now_unix_ns)
        write_chain(database, connection, project_id, hello.commit)
        _insert_run(database, connection, hello, project_id, workload_id, now_unix_ns)
    elif run.project_id != project_id:
        raise ValueError(f"run {key.run_id} belongs to another project than {hello.project!r}")
    else:
        news: dict[str, object] = {}
        if run.attempt < key.attempt:
            news = {"attempt": key.attempt, "world_size": hello.world_size, "reporting_ranks": _reporting_ranks(hello)}
        if (hello.commit.sha or hello.commit.branch) and not (run.commit_sha or run.branch):
            write_chain(database, connection, project_id, hello.commit)
            news |= {"commit_sha": hello.commit.sha, "branch": hello.commit.branch, "dirty": hello.commit.dirty}
        if news:
            connection.execute(update(runs).where(runs.c.id == key.run_id).values(news))
    cursor = _open_rank(database, connection, hello, now_unix_ns)
    database.many(connection, _TOUCH_RUN, [(now_unix_ns, key.run_id, now_unix_ns)])
    settle(connection, {key.run_id}, now_unix_ns)
    return cursor


def _insert_run(
    database: Database, connection: Connection, hello: Hello, project_id: str, workload_id: str, now_unix_ns: int
) -> None:
    commit = hello.commit
    program = (commit.sha, commit.branch, commit.dirty, hello.script)
    size = (hello.key.attempt, hello.world_size, _reporting_ranks(hello))
    times = (hello.started_unix_ns, now_unix_ns, None)
    row = (hello.key.run_id, project_id, workload_id, *program, "running", *size, *times)
    database.many(connection, _INSERT_RUN, [row])


def _reporting_ranks(hello: Hello) -> int:
    return hello.reporting_ranks or hello.world_size


def _open_rank(database: Database, connection: Connection, hello: Hello, now_unix_ns: int) -> int:
    key = (hello.key.run_id, hello.key.attempt, hello.key.rank)
    this = (ranks.c.run_id == key[0]) & (ranks.c.attempt == key[1]) & (ranks.c.rank == key[2])
    row = connection.execute(select(ranks.c.state, ranks.c.acked_frame).where(this)).one_or_none()
    if row is None:
        machine = (hello.hostname, hello.pid, hello.torch_version, hello.agent_version)
        nothing_yet = ("live", "", 0, 0, 0, 0, 0, "", 0)
        database.many(connection, _INSERT_RANK, [(*key, *machine, *nothing_yet, hello.started_unix_ns, now_unix_ns)])
        return 0
    state = "live" if row.state == "lost" else row.state
    connection.execute(update(ranks).where(this).values(state=state, last_seen_unix_ns=now_unix_ns))
    return int(row.acked_frame)


@dataclass(slots=True)
class _RankRow:
    """One rank's row while the writes of one transaction are applied to it."""

    key: tuple[str, int, int]
    project_id: str
    state: str
    detail: str
    acked_frame: int
    steps: int
    calls: int
    dropped_calls: int
    dropped_steps: int
    drop_reason: str
    rejected_frames: int
    expected_calls: int | None
    unverified_calls: int | None
    unattributed_calls: int | None
    recording_ns: int | None
    elapsed_ns: int | None

    @classmethod
    def of(cls, values: RowMapping) -> _RankRow:
        """From a row of ``_read_ranks``."""
        rest = {name: values[name] for name in cls.__slots__ if name != "key"}
        return cls(key=(values["run_id"], values["attempt"], values["rank"]), **rest)

    def update_row(self, now_unix_ns: int) -> tuple[object, ...]:
        """Parameters of ``_UPDATE_RANK``."""
        counters = (self.steps, self.calls, self.dropped_calls, self.dropped_steps, self.drop_reason)
        later = [getattr(self, name) for name in _LATER_COUNTERS]
        return (
            self.state,
            self.detail,
            self.acked_frame,
            *counters,
            self.rejected_frames,
            *later,
            now_unix_ns,
            *self.key,
        )

    def advance(self, progress: Progress) -> None:
        """Take the counters, which never go backwards."""
        self.steps = max(self.steps, progress.steps)
        self.calls = max(self.calls, progress.calls)
        self.dropped_calls = max(self.dropped_calls, progress.dropped_calls)
        self.dropped_steps = max(self.dropped_steps, progress.dropped_steps)
        self.drop_reason = progress.reason or self.drop_reason
        for name in _LATER_COUNTERS:
            known, told = getattr(self, name), getattr(progress, name)
            if told is not None:
                setattr(self, name, told if known is None else max(known, told))


class _Batch:
    """The rows that one transaction writes, in the order of arrival."""

    def __init__(self, database: Database, connection: Connection, now_unix_ns: int) -> None:
        self._database = database
        self._connection = connection
        self._now = now_unix_ns
        self._facts: list[tuple[object, ...]] = []
        self._ranges: list[tuple[object, ...]] = []
        self._growths: list[tuple[object, ...]] = []
        self._rejections: list[tuple[object, ...]] = []
        self._completeness = CompletenessWrites()
        self._captures = CaptureWrites(now_unix_ns)

    def add(self, write: StreamWrite, row: _RankRow) -> bool:
        """Apply one write to its rank's row. Returns whether the rank's state changed."""
        before = row.state
        for frame in write.frames:
            if frame.number <= row.acked_frame:
                continue
            if frame.number != row.acked_frame + 1:
                raise ValueError(f"frame {frame.number} of {write.key} would leave a gap after {row.acked_frame}")
            row.acked_frame = frame.number
            self._add_frame(frame, row)
        last = None if write.goodbye is None else write.goodbye.progress
        for progress in (write.progress, last):
            if progress is None:
                continue
            row.advance(progress)
            sizes = (progress.last_step, progress.last_step, progress.range_steps, progress.range_steps)
            self._growths.append((*sizes, *row.key, progress.range))
        if write.goodbye is not None:
            row.state, row.detail = write.goodbye.ending, write.goodbye.detail
        elif row.state == "lost" and (write.frames or write.progress):
            row.state = "live"
        return row.state != before

    def _add_frame(self, frame: Frame | RejectedFrame, row: _RankRow) -> None:
        if isinstance(frame, RejectedFrame):
            row.rejected_frames += 1
            self._rejections.append((*row.key, frame.number, frame.reason, self._now))
        elif isinstance(frame.content, Facts):
            facts = frame.content
            kinds = (facts.device_type, facts.backend, facts.compile_mode, facts.modules_hash)
            self._facts.append((codec.encode_mesh(facts.mesh), *kinds, *row.key))
        elif isinstance(frame.content, Completeness):
            self._completeness.add(row.key, frame.content)
        elif isinstance(frame.content, Capture):
            self._captures.add(row.key, frame.content)
        else:
            self._ranges.append(_range_row(frame.content, row))

    def write(self, rows: Sequence[_RankRow]) -> None:
        """Send the rows: ranges before the progress that grows them."""
        self._database.many(self._connection, _UPSERT_RANGE, self._ranges)
        self._database.many(self._connection, _UPDATE_FACTS, self._facts)
        self._database.many(self._connection, _INSERT_REJECTION, self._rejections)
        self._completeness.write(self._database, self._connection)
        self._captures.write(self._database, self._connection)
        self._database.many(self._connection, _GROW_RANGE, self._growths)
        self._database.many(self._connection, _UPDATE_RANK, [row.update_row(self._now) for row in rows])
        runs_seen = sorted({row.key[0] for row in rows})
        self._database.many(self._connection, _TOUCH_RUN, [(self._now, run_id, self._now) for run_id in runs_seen])


def apply(database: Database, connection: Connection, writes: Sequence[StreamWrite], now_unix_ns: int) -> None:
    """Store what the streams sent and advance their cursors."""
    rows = _read_ranks(connection, [write.key for write in writes])
    definitions: dict[str, list[StreamWrite]] = {}
    batch = _Batch(database, connection, now_unix_ns)
    changed: set[str] = set()
    for write in writes:
        row = rows.get(write.key)
        if row is None:
            raise ValueError(f"{write.key} never said hello")
        definitions.setdefault(row.project_id, []).append(write)
        if batch.add(write, row):
            changed.add(write.key.run_id)
    for project_id, theirs in definitions.items():
        bodies = [definition for write in theirs for definition in write.definitions]
        if bodies:
            write_definitions(database, connection, project_id, bodies)
    batch.write(list(rows.values()))
    settle(connection, changed, now_unix_ns)


def mark_lost(connection: Connection, silent_since_unix_ns: int, now_unix_ns: int) -> list[RankKey]:
    """Mark silent ranks lost and settle the runs they belong to."""
    silent = (ranks.c.state == "live") & (ranks.c.last_seen_unix_ns < silent_since_unix_ns)
    found = connection.execute(
        select(ranks.c.run_id, ranks.c.attempt, ranks.c.rank).where(silent).order_by(*ranks.primary_key.columns)
    ).all()
    if found:
        detail = "No sign of life: the process, its machine or its network is gone."
        connection.execute(update(ranks).where(silent).values(state="lost", detail=detail))
        settle(connection, {row.run_id for row in found}, now_unix_ns)
    settle_incomplete(connection, silent_since_unix_ns)
    return [RankKey(row.run_id, row.attempt, row.rank) for row in found]


def _range_row(content: StepRange, row: _RankRow) -> tuple[object, ...]:
    span = (content.first_step, content.last_step, content.steps)
    hashes = (content.pattern_hash, content.shapes_hash, content.lines_hash)
    statistics = (codec.encode_statistics(content.statistics), content.statistics_steps)
    return (*row.key, content.number, row.project_id, *span, *hashes, *statistics, content.unfinished)


def _read_ranks(connection: Connection, keys: Sequence[RankKey]) -> dict[RankKey, _RankRow]:
    wanted = sorted({(key.run_id, key.attempt, key.rank) for key in keys})
    columns = [column for column in ranks.c if column.name in (*_RankRow.__slots__, "run_id", "attempt", "rank")]
    statement = (
        select(*columns, runs.c.project_id)
        .join(runs, runs.c.id == ranks.c.run_id)
        .where(tuple_(ranks.c.run_id, ranks.c.attempt, ranks.c.rank).in_(wanted))
        .with_for_update(of=ranks)
    )
    rows = [_RankRow.of(row) for row in connection.execute(statement).mappings()]
    return {RankKey(*row.key): row for row in rows}
