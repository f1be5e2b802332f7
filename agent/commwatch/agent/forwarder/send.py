"""Sends one rank's folder: what the forwarder process and ``commwatch upload`` share."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from commwatch.agent.forwarder.delivery import Delivery, Waits
from commwatch.agent.forwarder.start import ROOT_VARIABLE
from commwatch.agent.forwarder.stream import UndeliverableError
from commwatch.agent.program.commit import describe_commit
from commwatch.agent.settings import AgentSettings
from commwatch.agent.spool.reader import SpoolReader
from commwatch.v1 import ingest_pb2

HASTY_DEADLINE_S = 5.0

_log = logging.getLogger("commwatch.forwarder")


def dial_jitter_s(world_size: int) -> float:
    """Longest wait before the first dial: 4,000 ranks are spread over 15 s, few ranks hardly wait."""
    return min(60.0, 15.0 * world_size / 4000)


def describe(reader: SpoolReader, environ: Mapping[str, str]) -> None:
    """Find out the commit of rank 0's program, once, put it into the hello and keep it in the spool if that can be."""
    root = environ.get(ROOT_VARIABLE, "")
    if reader.hello.rank != 0 or not root or reader.commit() is not None:
        return
    found = describe_commit(Path(root), environ)
    reader.hello.commit.CopyFrom(
        ingest_pb2.Commit(
            sha=found.sha,
            branch=found.branch,
            dirty=found.dirty,
            ancestors=found.ancestors,
            subject=found.subject,
        )
    )
    try:
        reader.keep_commit(reader.hello.commit)
    except OSError as error:  # such as a full disk: what can be sent now is sent all the same
        _log.warning("the commit is not kept in %s: %s", reader.folder, error)


async def send(reader: SpoolReader, settings: AgentSettings, *, live: bool, gone_s: float = 0.0) -> None:
    """Send everything and the goodbye, then delete the folder. ``live``: the rank may still run.

    ``gone_s``: for how long the rank is known to be gone. Raises DeadlineError, UndeliverableError, SpoolError or
    OSError; the folder is then left as it is.
    """
    assert settings.endpoint is not None
    if not reader.lock():
        raise UndeliverableError(f"another process sends {reader.folder} right now")
    commit = reader.commit()
    if commit is not None:
        reader.hello.commit.CopyFrom(commit)
    delivery = Delivery(
        reader,
        settings.endpoint,
        ended=reader.process.ended if live else lambda: True,
        waits=Waits(
            deadline=max(0.0, settings.deadline_s - gone_s),
            heartbeat=settings.heartbeat_s,
            dial=dial_jitter_s(reader.hello.world_size) if live else 0.0,
            renewed=not live,
        ),
    )
    if live:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, delivery.hasten, HASTY_DEADLINE_S)
        for ignored in (signal.SIGINT, signal.SIGHUP):  # meant for the job; this process ends with its rank
            loop.add_signal_handler(ignored, lambda: None)
    await delivery.run()
    reader.delete()


def still_runs(reader: SpoolReader) -> bool:
    """Whether the rank of this folder runs on this machine."""
    return reader.hello.hostname == os.uname().nodename and not reader.process.ended()
