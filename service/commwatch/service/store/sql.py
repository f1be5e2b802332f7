"""The store in SQL: one transaction for each method of the contract."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import TypeVar

from sqlalchemy import Connection

from commwatch.service.domain.alerts import Alert, AlertEvent
from commwatch.service.domain.captures import CapturedStep, CaptureRequest, CaptureSummary
from commwatch.service.domain.records import Definition, Hello, RankKey
from commwatch.service.domain.runs import Rank, RankRanges, Run
from commwatch.service.store import captures, commits, judgements, run_reads, streams
from commwatch.service.store.contract import Baseline, OpenRequest, StreamWrite
from commwatch.service.store.database import Database
from commwatch.service.store.definitions import read_definitions
from commwatch.service.store.projects import project_id
from commwatch.service.store.schema import alerts, projects, runs, workloads

_T = TypeVar("_T")


class SqlStore:
    """Implements ``contract.Store``. Made by ``opening.open_store``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> SqlStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release every connection. Idempotent."""
        self._database.close()

    def open_stream(self, hello: Hello, now_unix_ns: int) -> int:
        """See ``contract.Store``."""
        with self._database.writing() as connection:
            return streams.open_stream(self._database, connection, hello, now_unix_ns)

    def apply(self, writes: Sequence[StreamWrite], now_unix_ns: int) -> None:
        """See ``contract.Store``."""
        with self._database.writing() as connection:
            streams.apply(self._database, connection, writes, now_unix_ns)

    def mark_lost(self, silent_since_unix_ns: int, now_unix_ns: int) -> list[RankKey]:
        """See ``contract.Store``."""
        with self._database.writing() as connection:
            return streams.mark_lost(connection, silent_since_unix_ns, now_unix_ns)

    def runs(
        self,
        *,
        project: str | None = None,
        workload: str | None = None,
        commit_sha: str | None = None,
        branch: str | None = None,
        state: str | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> list[Run]:
        """See ``contract.Store``."""
        filters = (
            (projects.c.name, project),
            (workloads.c.name, workload),
            (runs.c.commit_sha, commit_sha),
            (runs.c.branch, branch),
            (runs.c.state, state),
        )
        where = [column == value for column, value in filters if value is not None]
        with self._database.reading() as connection:
            return run_reads.read_runs(connection, where, limit, offset)

    def run(self, run_id: str) -> Run | None:
        """See ``contract.Store``."""
        with self._database.reading() as connection:
            return next(iter(run_reads.read_runs(connection, [runs.c.id == run_id], 1, 0)), None)

    def run_ids(self, prefix: str, limit: int = 10) -> list[str]:
        """See ``contract.Store``."""
        with self._database.reading() as connection:
            return run_reads.run_ids(connection, prefix, limit)

    def ranks(self, run_id: str) -> list[Rank]:
        """See ``contract.Store``."""
        with self._database.reading() as connection:
            return run_reads.read_ranks(connection, run_id)

    def ranges(self, run_id: str) -> list[RankRanges]:
        """See ``contract.Store``."""
        with self._database.reading() as connection:
            return run_reads.read_ranges(connection, run_id)

    def definitions(self, project: str, hashes: Iterable[str]) -> dict[str, Definition]:
        """See ``contract.Store``."""
        wanted = set(hashes)
        return self._of_project(project, {}, lambda connection, id_: read_definitions(connection, id_, wanted))

    def captures(self, run_id: str) -> list[CaptureSummary]:
        """See ``contract.Store``."""
        with self._database.reading() as connection:
            return captures.read_summaries(connection, run_id)

    def capture(self, run_id: str, rank: int, step: int) -> CapturedStep | None:
        """See ``contract.Store``."""
        with self._database.reading() as connection:
            return captures.read_capture(connection, run_id, rank, step)

    def stored_parts(self, key: RankKey) -> dict[int, dict[int, int]]:
        """See ``contract.Store``."""
        with self._database.reading() as connection:
            return captures.stored_parts(connection, key)

    def ask_captures(self, run_id: str, ranks: Collection[int], steps: int, author: str, now_unix_ns: int) -> int:
        """See ``contract.Store``."""
        with self._database.writing() as connection:
            return captures.ask(self._database, connection, run_id, ranks, steps, author, now_unix_ns)

    def capture_requests(self, run_id: str) -> list[CaptureRequest]:
        """See ``contract.Store``."""
        with self._database.reading() as connection:
            return captures.read_requests(connection, run_id)

    def open_requests(self, run_ids: Collection[str]) -> list[OpenRequest]:
        """See ``contract.Store``."""
        with self._database.reading() as connection:
            return captures.read_open(connection, run_ids)

    def mark_sent(self, requests: Sequence[OpenRequest]) -> None:
        """See ``contract.Store``."""
        with self._database.writing() as connection:
            captures.mark_sent(self._database, connection, requests)

    def first_parents(self, project: str, sha: str, limit: int = 1000) -> list[str]:
        """See ``contract.Store``."""
        return self._of_project(project, [], lambda connection, id_: commits.first_parents(connection, id_, sha, limit))

    def commit_shas(self, project: str, prefix: str, limit: int = 10) -> list[str]:
        """See ``contract.Store``."""
        return self._of_project(
            project, [], lambda connection, id_: commits.commit_shas(connection, id_, prefix, limit)
        )

    def branch_heads(self, project: str, branch: str) -> list[str]:
        """See ``contract.Store``."""
        return self._of_project(project, [], lambda connection, id_: commits.branch_heads(connection, id_, branch))

    def names(self, project: str) -> tuple[list[str], list[str]]:
        """See ``contract.Store``."""
        nothing: tuple[list[str], list[str]] = ([], [])
        return self._of_project(project, nothing, commits.names)

    def accept(self, run_id: str, reason: str, author: str, now_unix_ns: int) -> Baseline:
        """See ``contract.Store``."""
        with self._database.writing() as connection:
            return judgements.accept(connection, run_id, reason, author, now_unix_ns)

    def baselines(self, project: str, workload: str) -> list[Baseline]:
        """See ``contract.Store``."""
        return self._of_project(
            project, [], lambda connection, id_: judgements.read_baselines(connection, id_, workload)
        )

    def record_comparison(
        self,
        head_run_id: str,
        base_run_id: str | None,
        verdict: str,
        reason: str,
        alerts: Sequence[Alert],
        now_unix_ns: int,
    ) -> list[Alert]:
        """See ``contract.Store``."""
        with self._database.writing() as connection:
            return judgements.record_comparison(
                connection, head_run_id, base_run_id, verdict, reason, alerts, now_unix_ns
            )

    def compared(self, head_run_id: str) -> tuple[str | None, str, str] | None:
        """See ``contract.Store``."""
        with self._database.reading() as connection:
            return judgements.compared(connection, head_run_id)

    def alerts(
        self, *, project: str | None = None, state: str | None = None, run_id: str | None = None, limit: int = 100
    ) -> list[Alert]:
        """See ``contract.Store``."""
        filters = ((projects.c.name, project), (alerts.c.state, state))
        where = [column == value for column, value in filters if value is not None]
        if run_id is not None:
            where.append(judgements.shown_by(run_id))
        with self._database.reading() as connection:
            return judgements.read_alerts(connection, where, limit)

    def alert_events(self, alert_id: str) -> list[AlertEvent]:
        """See ``contract.Store``."""
        with self._database.reading() as connection:
            return judgements.read_events(connection, alert_id)

    def _of_project(self, project: str, nothing: _T, read: Callable[[Connection, str], _T]) -> _T:
        """Read something of a project; ``nothing`` when no run named the project."""
        with self._database.reading() as connection:
            id_ = project_id(connection, project)
            return nothing if id_ is None else read(connection, id_)
