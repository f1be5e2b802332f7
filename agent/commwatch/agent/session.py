"""The recording of this process: from its first process group to its end."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commwatch.agent import identity
from commwatch.agent.capture.plan import Plan
from commwatch.agent.forwarder.start import START_LIMIT_S, start_forwarder
from commwatch.agent.program.script import script_of
from commwatch.agent.recorder import features, torch_private
from commwatch.agent.recorder.recorder import Recorder, SelfTestError
from commwatch.agent.settings import SettingsError, load
from commwatch.agent.spool.writer import SpoolWriter
from commwatch.agent.version import version
from commwatch.v1 import ingest_pb2

_log = logging.getLogger("commwatch")
_session: Session | None = None


class Session:
    """One rank's recorder with its spool and forwarder."""

    def __init__(self, recorder_root: Path, spool: SpoolWriter, plan: Plan) -> None:
        self._spool = spool
        self._pid = os.getpid()
        self._ended = False
        self._starting: threading.Thread | None = None
        self.recorder = Recorder(spool, recorder_root, self._failed, plan)

    def begin(self) -> None:
        """Start to record."""
        self.recorder.start()
        atexit.register(self.end)

    def send(self, root: Path, environ: Mapping[str, str], *, describe_only: bool) -> None:
        """Start the forwarder beside the job: starting a process takes a while where the file system is slow."""
        folder = self._spool.folder

        def start() -> None:
            try:
                start_forwarder(folder, root, environ, describe_only=describe_only)
            except Exception as error:  # noqa: BLE001  a trace of this thread would be no line of the job's
                _log.warning("commwatch: nobody sends the records: %s; later: `commwatch upload %s`", error, folder)

        self._starting = threading.Thread(target=start, name="commwatch-start", daemon=True)
        self._starting.start()

    def end(self) -> None:
        """The interpreter ends: hand over what is left and say how it ended."""
        if self._ended or os.getpid() != self._pid:
            return
        self._ended = True
        try:
            self.recorder.stop()
            self.recorder.finish()
            if self._starting is not None:
                self._starting.join(START_LIMIT_S)
            error = getattr(sys, "last_type", None)
            if error is None:
                self._spool.close("clean", "")
            else:
                self._spool.close("exception", error.__name__)
        except Exception as failure:  # noqa: BLE001  the job is over; its exit code is not ours to change
            _log.warning("commwatch: the last records were not kept: %s: %s", type(failure).__name__, failure)

    def _failed(self, error: BaseException) -> None:
        self.recorder.silence()
        reason = f"recorder switched off: {type(error).__name__}"
        self._spool.note(reason)  # leaves the job: the message, which may hold data, does not
        debug = _log.isEnabledFor(logging.DEBUG)
        _log.warning("commwatch: %s: %s; the job goes on unrecorded", reason, error, exc_info=debug)


def step() -> None:
    """Mark the end of a step by hand: inference, several optimizers, loops of your own.

    From the first call on, optimizers no longer end steps. Does nothing when this process is not recorded.
    """
    if _session is not None:
        _session.recorder.step()


def current() -> Session | None:
    """The recording of this process, if any."""
    return _session


def start(*, world_size: int, rank: int, store: Any, environ: Mapping[str, str]) -> None:
    """Begin recording in this process. Logs one line and records nothing when that cannot work; never raises."""
    global _session
    try:
        settings = load(environ)
    except SettingsError as error:
        _log.warning("commwatch: not recording: %s", error)
        return
    if settings.level == "off":
        return
    missing = torch_private.missing()
    if missing:
        _log.warning("commwatch: not recording: this torch lacks %s; run `commwatch doctor`", ", ".join(missing))
        return
    import torch

    script = script_of(sys.modules)
    fake = torch_private.is_fake_store(store)
    run_id, shared = identity.shared_run_id(store, environ, settings.run_id)
    if not shared and world_size > 1 and not fake:
        _log.warning(
            "commwatch: not recording: the ranks have no common store to agree on a run; set COMMWATCH_RUN_ID to a UUID"
        )
        return
    attempt = identity.attempt_of(environ)
    hello = ingest_pb2.Hello(
        agent_version=version(),
        project=settings.project,
        workload=settings.workload or script.workload,
        run_id=run_id,
        attempt=attempt,
        rank=rank,
        world_size=world_size,
        reporting_ranks=1 if fake else world_size,
        hostname=os.uname().nodename,
        pid=os.getpid(),
        torch_version=torch.__version__,
        started_unix_ns=time.time_ns(),
        script=script.name,
    )
    try:
        spool = SpoolWriter(settings.rank_directory(run_id, attempt, rank), hello, settings.spool_max_bytes)
    except OSError as error:
        _log.warning("commwatch: not recording: cannot write the spool (COMMWATCH_SPOOL_DIR): %s", error)
        return
    session = Session(script.root, spool, settings.capture)
    try:
        session.begin()
    except SelfTestError as error:
        spool.abandon()
        _log.warning("commwatch: not recording: %s", error)
        return
    _session = session
    without = features.reduced_text(features.FEATURES if settings.capture.empty else features.FOR_CAPTURES)
    if without:
        _log.warning("commwatch: recording less than it could: %s; run `commwatch doctor`", without)
    _session.send(script.root, dict(environ), describe_only=settings.endpoint is None)


def _in_child() -> None:
    global _session
    _session = None


os.register_at_fork(after_in_child=_in_child)
