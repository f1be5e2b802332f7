"""Captures steps of a running job: enters the op recorder between two steps and leaves it at the end of the next.

A dispatch mode sits on a stack that the program uses too. So it is entered only where no mode of the program's is
active, which might be left while ours stands above it, and it is taken away only where it stands on top; until then it
is muted and passes everything through.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol

from commwatch.agent.capture.plan import MAX_CAPTURES, Plan
from commwatch.agent.recorder.catalog import Op
from commwatch.agent.recorder.codes import raised_by_signal
from commwatch.agent.recorder.observer import Observer
from commwatch.v1 import records_pb2

if TYPE_CHECKING:
    from commwatch.agent.capture.op_capture import OpCapture

MAX_WAIT_STEPS = 100
"""Steps a requested capture waits for a moment at which no dispatch mode of the program is active."""

_log = logging.getLogger("commwatch")


class Sink(Protocol):
    """Where captures go, and where requests come from: the spool."""

    def append(self, content: records_pb2.Capture) -> bool:
        """Keep one part under the next number; False when it was dropped."""

    def requested(self) -> tuple[int, int]:
        """(number, steps) of the newest request; (0, 0) before the first."""


class Capturer:
    """One for each recorder. Its methods do not raise: a failure ends the capture, and captures with it."""

    def __init__(self, observer: Observer, sink: Sink, plan: Plan) -> None:
        self._observer = observer
        self._sink = sink
        self._plan = plan
        self._planned = 0
        self.request = 0
        """The newest request that was taken up: the forwarder then hands over the next."""
        self._steps_left = 0
        self._waited = 0
        self._off = ""
        self._mode: OpCapture | None = None
        self._left_behind: list[OpCapture] = []
        self._thread = 0

    @property
    def running(self) -> bool:
        """Whether a step is being captured."""
        return self._mode is not None

    def step_begins(self, step: int) -> None:
        """The step with this number begins on this thread: capture it if it is to be."""
        try:
            self._begin(step)
        except Exception as error:  # noqa: BLE001  a capture may fail, the job's step may not
            self._fail(error)

    def _begin(self, step: int) -> None:
        number, steps = self._sink.requested()
        if number > self.request and not self._steps_left:
            self.request, self._steps_left, self._waited = number, steps, 0
        if not self._steps_left and (self._planned >= MAX_CAPTURES or not self._plan.wants(step)):
            return
        why_not = self._off or self._enter()
        if why_not:
            self._refused(step, why_not)

    def saw(self, op: Op, identity: int, position: int) -> None:
        """A collective of the step: its identity in the observer and 1 + its position, 0 when that is not known."""
        try:
            if self._mode is not None:
                self._mode.saw(op, identity, position)
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)

    def step_ended(self, step: int, reason: str = "") -> int:
        """The step with this number ended, or the process ends within it: then ``reason`` says so.

        Returns the nanoseconds the step's records took.
        """
        mode, self._mode = self._mode, None
        self._observer.tracker.listener = None
        try:
            if mode is not None:
                mode.listening = False
                if mode not in self._left_behind:
                    self._left_behind.append(mode)
            self._tidy()
            if mode is not None:
                self._send(mode, step, reason)
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)
        return mode.spent_ns if mode is not None else 0

    def close(self) -> None:
        """Captures no more. Called again, takes away a mode that stood below others or ran the call before."""
        self._off = self._off or "the recorder stopped"
        try:
            if self._mode is not None:
                self._mode.listening = False
                if self._mode not in self._left_behind:
                    self._left_behind.append(self._mode)
            self._tidy()
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)

    # Entering and leaving

    def _enter(self) -> str:
        """Begin; returns why it is not possible, or nothing."""
        from commwatch.agent.capture.op_capture import OpCapture
        from commwatch.agent.debug import torch_private as private

        missing = private.missing()
        if missing:
            self._off = f"this torch lacks {', '.join(missing)}"
            return self._off
        if private.program_modes():
            return "a dispatch mode of the program is active"
        mode = OpCapture(self._observer, hashes=self._plan.hashes)
        self._thread = threading.get_ident()
        self._observer.tracker.listener = self._mode = mode
        mode.__enter__()
        return ""

    def _tidy(self) -> None:
        """Take modes away: those that stand on top of this thread's stack."""
        if self._left_behind and threading.get_ident() == self._thread:
            from commwatch.agent.debug import torch_private as private

            while self._left_behind and private.on_top() is self._left_behind[-1]:
                self._left_behind.pop().__exit__(None, None, None)

    def _refused(self, step: int, reason: str) -> None:
        """A planned step is not captured and says so; a requested one waits for a better moment, for a while."""
        if self._steps_left:
            self._waited += 1
            if not self._off and self._waited <= MAX_WAIT_STEPS:
                return
            self._steps_left = 0
            request = self.request
        else:
            request = 0
            self._planned += 1
        self._sink.append(records_pb2.Capture(step=step, part=1, last_part=True, request=request, reason=reason))

    def _fail(self, error: Exception) -> None:
        if raised_by_signal(error):
            raise error
        self._off = f"captures switched off: {type(error).__name__}"  # leaves the job: the message does not
        _log.warning("commwatch: captures switched off: %s: %s; the job goes on", type(error).__name__, error)
        if self._mode is not None:
            self._mode.listening = False

    # Sending

    def _send(self, mode: OpCapture, step: int, reason: str) -> None:
        from commwatch.agent.capture.messages import Encoder

        request = self.request if self._steps_left else 0
        if self._steps_left:
            self._steps_left -= 1
        else:
            self._planned += 1
        if mode.failure is not None:
            reason = reason or f"recording ended early: {type(mode.failure).__name__}"
        if mode.dropped_records:
            reason = reason or f"more than {mode.max_records} records"
        encoder = Encoder(mode.operators, mode.collectives, self._observer.identities, mode.places.lines)
        dropped = mode.dropped_records
        waiting: records_pb2.Capture | None = None
        number = 0
        for part in encoder.parts():
            if waiting is not None and not self._sink.append(waiting):
                dropped += len(waiting.records)
                reason = "the spool has no room for captures (COMMWATCH_SPOOL_MAX_BYTES)"
                waiting = None
            if number and waiting is None:
                dropped += len(part.records)
                continue
            number += 1
            part.step, part.part, part.request = step, number, request
            waiting = part
        last = waiting if waiting is not None else records_pb2.Capture(step=step, part=number, request=request)
        last.last_part, last.dropped_records, last.reason = True, dropped, reason
        if not self._sink.append(last):
            dropped += len(last.records)
            no_room = "the spool has no room for captures (COMMWATCH_SPOOL_MAX_BYTES)"
            self._sink.append(
                records_pb2.Capture(
                    step=step,
                    part=last.part,
                    request=request,
                    last_part=True,
                    dropped_records=dropped,
                    reason=no_room,
                )
            )
