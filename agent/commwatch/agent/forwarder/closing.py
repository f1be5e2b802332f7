"""A rank's counters as the wire has them."""

from __future__ import annotations

from commwatch.agent.spool import page
from commwatch.v1 import ingest_pb2

_ENDINGS = {page.CLEAN: ingest_pb2.ENDING_CLEAN, page.EXCEPTION: ingest_pb2.ENDING_EXCEPTION}


def progress(counters: page.Counters) -> ingest_pb2.Progress:
    """For a heartbeat."""
    return ingest_pb2.Progress(
        range=counters.range_number,
        last_step=counters.last_step,
        range_steps=counters.range_steps,
        steps=counters.steps,
        calls=counters.calls,
        dropped_calls=counters.dropped_calls,
        dropped_steps=counters.dropped_steps,
        reason=counters.reason,
        expected_calls=counters.expected_calls,
        unverified_calls=counters.unverified_calls,
        unattributed_calls=counters.unattributed_calls,
        recording_ns=counters.recording_ns,
        elapsed_ns=counters.elapsed_ns,
    )


def goodbye(counters: page.Counters) -> ingest_pb2.Goodbye:
    """For a rank that is gone: one that did not say how it ended was killed."""
    ending = _ENDINGS.get(counters.ending)
    if ending is None:
        detail = "the process ended without a goodbye"
        return ingest_pb2.Goodbye(ending=ingest_pb2.ENDING_LOST, detail=detail, progress=progress(counters))
    return ingest_pb2.Goodbye(ending=ending, detail=counters.detail, progress=progress(counters))
