"""The state of a run, from the states of the ranks of its newest attempt. See RUN_STATES."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import Connection, func, select, update

from commwatch.service.store.schema import ranks, runs


def state_of(reporting_ranks: int, ranks_by_state: Mapping[str, int]) -> str:
    """State of a run of which so many ranks report, with so many ranks in each state.

    Ranks that never said hello keep it running: they may be about to. ``settle_incomplete`` ends the waiting.
    """
    if ranks_by_state.get("live", 0):
        return "running"
    if ranks_by_state.get("lost", 0) or ranks_by_state.get("exception", 0):
        return "lost"
    return "complete" if ranks_by_state.get("clean", 0) >= reporting_ranks else "running"


def settle(connection: Connection, run_ids: Collection[str], now_unix_ns: int) -> None:
    """Write the state of runs whose ranks changed theirs."""
    for run_id in sorted(run_ids):
        run = connection.execute(
            select(runs.c.attempt, runs.c.reporting_ranks, runs.c.state, runs.c.ended_unix_ns).where(
                runs.c.id == run_id
            )
        ).one()
        of_newest = (ranks.c.run_id == run_id) & (ranks.c.attempt == run.attempt)
        counted = connection.execute(select(ranks.c.state, func.count()).where(of_newest).group_by(ranks.c.state)).all()
        state = state_of(run.reporting_ranks, {row[0]: row[1] for row in counted})
        ended = None if state == "running" else run.ended_unix_ns or now_unix_ns
        if (state, ended) != (run.state, run.ended_unix_ns):
            connection.execute(update(runs).where(runs.c.id == run_id).values(state=state, ended_unix_ns=ended))


def settle_incomplete(connection: Connection, silent_since_unix_ns: int) -> None:
    """Close as lost the runs in which no rank is live, nothing was heard for long, and some rank never said hello."""
    live = select(ranks.c.run_id).where(
        ranks.c.run_id == runs.c.id, ranks.c.attempt == runs.c.attempt, ranks.c.state == "live"
    )
    stale = (runs.c.state == "running") & (runs.c.last_seen_unix_ns < silent_since_unix_ns) & ~live.exists()
    connection.execute(update(runs).where(stale).values(state="lost", ended_unix_ns=runs.c.last_seen_unix_ns))
