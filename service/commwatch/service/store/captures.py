"""Captures and the requests for them. See ``domain.captures``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import ColumnElement, Connection, RowMapping, and_, select

from commwatch.service.domain.captures import (
    MAX_OPEN_REQUESTS,
    MAX_REQUESTS,
    Capture,
    CapturedStep,
    CaptureRequest,
    CaptureSummary,
    join,
)
from commwatch.service.domain.records import RankKey
from commwatch.service.domain.steady import ranks_in_words
from commwatch.service.domain.wording import short_id
from commwatch.service.store import codec
from commwatch.service.store.contract import OpenRequest, RequestRefusedError
from commwatch.service.store.database import Database, insert_sql
from commwatch.service.store.schema import capture_requests, captures, ranks, runs

_INSERT = insert_sql(captures)
_INSERT_REQUEST = insert_sql(capture_requests)
_OF_RANK = "run_id = ? AND attempt = ? AND rank = ? AND number = ? AND state IN ('asked', 'sent')"
_REFUSE = f"UPDATE capture_requests SET state = 'refused', reason = ? WHERE {_OF_RANK}"  # noqa: S608  # no values
# A request is captured when as many steps as it asked for have come to their last part.
_CAPTURE = (
    f"UPDATE capture_requests SET state = 'captured' WHERE {_OF_RANK} AND steps <= (SELECT count(*) FROM captures c"  # noqa: S608  # no values
    " WHERE c.run_id = capture_requests.run_id AND c.attempt = capture_requests.attempt"
    " AND c.rank = capture_requests.rank AND c.request = capture_requests.number AND c.last_part)"
)
_SEND = f"UPDATE capture_requests SET state = 'sent' WHERE {_OF_RANK}"  # noqa: S608  # no values
_OF_NEWEST = and_(captures.c.run_id == runs.c.id, captures.c.attempt == runs.c.attempt)
_HEADER = [column for column in captures.c if column.name != "body"]


class CaptureWrites:
    """The captures that one transaction stores, in the order of arrival."""

    def __init__(self, now_unix_ns: int) -> None:
        self._now = now_unix_ns
        self._rows: list[tuple[object, ...]] = []
        self._refused: list[tuple[object, ...]] = []
        self._answered: dict[tuple[object, ...], None] = {}

    def add(self, key: tuple[str, int, int], capture: Capture) -> None:
        """One part, or a refusal, which is kept with its request alone."""
        if capture.refuses:
            self._refused.append((capture.reason, *key, capture.request))
            return
        place = (*key, capture.step, capture.part, capture.last_part, capture.request)
        counts = (len(capture.records), capture.collectives, capture.dropped_records)
        self._rows.append((*place, *counts, capture.reason, self._now, codec.encode_capture(capture)))
        if capture.request:
            self._answered[(*key, capture.request)] = None

    def write(self, database: Database, connection: Connection) -> None:
        """Send the rows; a part that is stored stays as it is."""
        database.many(connection, _INSERT, self._rows)
        database.many(connection, _REFUSE, self._refused)
        database.many(connection, _CAPTURE, list(self._answered))


def stored_parts(connection: Connection, key: RankKey) -> dict[int, dict[int, int]]:
    """Records of each stored part of one rank, by step and part."""
    of_rank = (captures.c.run_id == key.run_id) & (captures.c.attempt == key.attempt) & (captures.c.rank == key.rank)
    found: dict[int, dict[int, int]] = {}
    for step, part, records in connection.execute(
        select(captures.c.step, captures.c.part, captures.c.records).where(of_rank)
    ):
        found.setdefault(step, {})[part] = records
    return found


def read_summaries(connection: Connection, run_id: str) -> list[CaptureSummary]:
    """What is stored of every captured step, by step and rank."""
    steps: dict[tuple[int, int], list[RowMapping]] = {}
    for row in _headers(connection, captures.c.run_id == run_id):
        steps.setdefault((row["step"], row["rank"]), []).append(row)
    return [_summary(rows) for rows in steps.values()]


def read_capture(connection: Connection, run_id: str, rank: int, step: int) -> CapturedStep | None:
    """The joined parts of one step."""
    this = (captures.c.run_id == run_id) & (captures.c.rank == rank) & (captures.c.step == step)
    statement = select(captures).join(runs, _OF_NEWEST).where(this).order_by(captures.c.part)
    rows = connection.execute(statement).mappings().all()
    if not rows:
        return None
    names = ("step", "part", "last_part", "request", "dropped_records", "reason")
    parts = [codec.decode_capture(row["body"], **{name: row[name] for name in names}) for row in rows]
    return join(_summary(rows), parts)


def ask(
    database: Database,
    connection: Connection,
    run_id: str,
    wanted: Collection[int],
    steps: int,
    author: str,
    now_unix_ns: int,
) -> int:
    """Store a request. Raises KeyError for an unknown run, RequestRefusedError beyond a limit."""
    run = connection.execute(select(runs.c.attempt).where(runs.c.id == run_id).with_for_update()).one_or_none()
    if run is None:
        raise KeyError(run_id)
    of_newest = (ranks.c.run_id == run_id) & (ranks.c.attempt == run.attempt)
    known = set(connection.scalars(select(ranks.c.rank).where(of_newest)))
    unknown = sorted(set(wanted) - known)
    if unknown:
        verb = "does" if len(unknown) == 1 else "do"
        reporting = ranks_in_words(known).lower() if known else "no ranks"
        raise RequestRefusedError(
            f"{ranks_in_words(unknown)} {verb} not report in run {short_id(run_id)}, which has {reporting}."
        )
    requests = read_requests(connection, run_id)
    opened = {request.number for request in requests if request.state in ("asked", "sent")}
    if len(opened) >= MAX_OPEN_REQUESTS:
        raise RequestRefusedError(
            f"Run {short_id(run_id)} has {len(opened)} open capture requests, as many as a run may have: "
            "ask again when its ranks have answered them."
        )
    number = max((request.number for request in requests), default=0) + 1
    if number > MAX_REQUESTS:
        raise RequestRefusedError(
            f"Run {short_id(run_id)} was asked for captures {MAX_REQUESTS} times, as often as a run may be: "
            "set COMMWATCH_CAPTURE_STEPS for the next one."
        )
    rows = [
        (run_id, number, rank, run.attempt, steps, author, now_unix_ns, "asked", "") for rank in sorted(set(wanted))
    ]
    database.many(connection, _INSERT_REQUEST, rows)
    return number


def read_requests(connection: Connection, run_id: str) -> list[CaptureRequest]:
    """Every request of a run, by number and rank."""
    captured: dict[tuple[int, int, int], list[int]] = {}
    answers = (captures.c.run_id == run_id) & (captures.c.request > 0) & captures.c.last_part
    for row in connection.execute(select(*_HEADER).where(answers).order_by(captures.c.step)).mappings():
        captured.setdefault((row["request"], row["attempt"], row["rank"]), []).append(row["step"])
    statement = (
        select(
            capture_requests,
            ranks.c.state.label("rank_state"),
            ranks.c.detail,
            ranks.c.steps.label("rank_steps"),
            runs.c.attempt.label("newest_attempt"),
        )
        .join(runs, runs.c.id == capture_requests.c.run_id)
        .join(ranks, _same_rank())
        .where(capture_requests.c.run_id == run_id)
        .order_by(capture_requests.c.number, capture_requests.c.rank)
    )
    found = []
    for row in connection.execute(statement).mappings():
        state, reason = row["state"], row["reason"]
        missed = _missed(row) if state in ("asked", "sent") else ""
        own = ("number", "attempt", "rank", "steps", "asked_by", "asked_unix_ns")
        steps = tuple(captured.get((row["number"], row["attempt"], row["rank"]), ()))
        found.append(
            CaptureRequest(
                **{name: row[name] for name in own},
                state="missed" if missed else state,
                reason=missed or reason,
                captured_steps=steps,
            )
        )
    return found


def read_open(connection: Connection, run_ids: Collection[str]) -> list[OpenRequest]:
    """Requests of the runs that nobody answered yet, in one query."""
    columns = ("run_id", "attempt", "rank", "number", "steps", "state")
    statement = (
        select(*(capture_requests.c[name] for name in columns))
        .where(capture_requests.c.run_id.in_(run_ids), capture_requests.c.state.in_(("asked", "sent")))
        .order_by(capture_requests.c.run_id, capture_requests.c.number)
    )
    return [
        OpenRequest(RankKey(row.run_id, row.attempt, row.rank), row.number, row.steps, row.state == "sent")
        for row in connection.execute(statement)
    ]


def mark_sent(database: Database, connection: Connection, sent: Sequence[OpenRequest]) -> None:
    """Note that they were written to their streams; those answered meanwhile stay answered."""
    keys = [(item.key.run_id, item.key.attempt, item.key.rank, item.number) for item in sent]
    database.many(connection, _SEND, keys)


def _headers(connection: Connection, where: ColumnElement[bool]) -> Sequence[RowMapping]:
    order = (captures.c.step, captures.c.rank, captures.c.part)
    return connection.execute(select(*_HEADER).join(runs, _OF_NEWEST).where(where).order_by(*order)).mappings().all()


def _summary(rows: Sequence[RowMapping]) -> CaptureSummary:
    """Of the parts of one step, in their order."""
    last = rows[-1]
    sums = {name: sum(row[name] for row in rows) for name in ("records", "collectives", "dropped_records")}
    return CaptureSummary(
        rank=last["rank"],
        step=last["step"],
        parts=len(rows),
        whole=bool(last["last_part"]) and last["part"] == len(rows),
        request=last["request"],
        reason=" ".join(dict.fromkeys(row["reason"] for row in rows if row["reason"])),
        stored_unix_ns=last["stored_unix_ns"],
        **sums,
    )


def _same_rank() -> ColumnElement[bool]:
    return and_(
        ranks.c.run_id == capture_requests.c.run_id,
        ranks.c.attempt == capture_requests.c.attempt,
        ranks.c.rank == capture_requests.c.rank,
    )


def _missed(row: RowMapping) -> str:
    """Why an open request will not be answered, as far as is known now; empty while it may be."""
    if row["attempt"] < row["newest_attempt"]:
        return f"Attempt {row['newest_attempt']} of the run superseded the rank's attempt {row['attempt']}."
    after = f"after {row['rank_steps']} steps"
    detail = f" ({row['detail']})" if row["detail"] else ""
    ended = {
        "clean": f"The rank ended {after}.",
        "exception": f"The rank ended with an exception{detail} {after}.",
        "lost": f"The rank was lost {after}.",
    }
    return ended.get(row["rank_state"], "")
