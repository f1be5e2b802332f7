"""The recorder of a rank: sees collectives, cuts them into steps, hands step ranges to a sink."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol

from torch.optim import optimizer as optimizers

from commwatch.agent.capture.capturer import Capturer
from commwatch.agent.capture.capturer import Sink as CaptureSink
from commwatch.agent.capture.plan import Plan
from commwatch.agent.recorder import facts, interpose, meshes, ranges, selftest, torch_private
from commwatch.agent.recorder.catalog import Op
from commwatch.agent.recorder.codes import raised_by_signal
from commwatch.agent.recorder.completeness import Reconciler
from commwatch.agent.recorder.cost import Cost
from commwatch.agent.recorder.observer import Observer
from commwatch.agent.spool.page import Numbers

MAX_CALLS_PER_STEP = 200_000
"""Calls kept for one step; later ones of the step are counted as dropped. A process that never steps stops there."""

_NESTED = frozenset({"backward", "recompute"})


class SelfTestError(RuntimeError):
    """Interposition does not work in this process; the message says how."""


class Sink(ranges.Sink, CaptureSink, Protocol):
    """Where records and counters go: the spool."""

    def publish(self, numbers: Numbers) -> None:
        """Show the counters to the forwarder, at the cost of a memory write."""


class Recorder:
    """Records until ``stop``. Every hook is total: an error switches recording off through ``on_error``, once."""

    def __init__(
        self, sink: Sink, root: Path, on_error: Callable[[BaseException], None], plan: Plan | None = None
    ) -> None:
        self.observer = Observer(root, self._outermost_without_grad)
        self._sink = sink
        self._ranges = ranges.Ranges(self.observer, sink, time.monotonic)
        self._facts = facts.FactsReporter(self.observer, sink)
        self.completeness = Reconciler(self.observer, sink, time.monotonic)
        self.cost = Cost()
        self.capturer = Capturer(self.observer, sink, plan or Plan())
        self._on_error = on_error
        self._calls: list[tuple[int, int]] = []
        self._other_threads: list[tuple[int, int]] = []
        self._home = threading.get_ident()
        self._finished_calls = 0
        self._dropped_calls = 0
        self._backward_seen = False
        self._sequence = torch_private.sequence_number()
        self._by_hand = False
        self._optimizer_seen = False
        self._running = False
        self._handles: list[Any] = []

    def start(self) -> None:
        """Put every hook in place. Raises SelfTestError, and leaves nothing behind, where recording cannot work."""
        wrong = selftest.failure(then=self._see)
        if wrong:
            raise SelfTestError(f"the self-test failed: {wrong}; run `commwatch doctor`")
        self._running = True
        self.observer.groups.on_seen = self.completeness.seen
        self.completeness.start()
        # torch.compile(module) warns once where global hooks exist: these do not mind to be called once more.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        meshes.watch(self.observer.groups)
        self.observer.tracker.install()
        self._handles = [optimizers.register_optimizer_step_post_hook(self._after_optimizer)]
        os.register_at_fork(after_in_child=self._in_child)
        self.cost.start()
        self.capturer.step_begins(1)

    def stop(self) -> None:
        """Take every hook away. Nothing more is recorded. Idempotent."""
        self._running = False
        self.capturer.step_ended(self._ranges.steps + 1, "the process ended within this step")
        self.capturer.close()
        interpose.remove(self._see)
        meshes.unwatch(self.observer.groups)
        self.observer.tracker.remove()
        while self._handles:
            self._handles.pop().remove()

    def silence(self) -> None:
        """Record nothing more. The hooks stay until ``stop`` and return at once: any of them may call this."""
        self._running = False
        self.capturer.close()
        interpose.silence(self._see)
        self.observer.tracker.disable()

    def finish(self) -> None:
        """Hand over what stands after the last finished step. Call once, after ``stop``."""
        calls, others = self._take_calls()
        identities, sizes = _columns(calls)
        self._facts.report()
        self.completeness.step(self._ranges.steps + 1, identities, sizes, others)
        self._ranges.finish(identities, sizes)
        self.completeness.finish(self._ranges.steps)
        self._publish()

    def step(self) -> None:
        """A step ended, says the program. From the first time on, optimizers no longer end steps."""
        self._by_hand = True
        if self._running:
            self._guard(self._end_step)

    # Hooks

    def _see(self, op: Op, args: tuple[Any, ...]) -> None:
        began = perf_counter_ns()
        try:
            identity, size, phase = self.observer.observe(op, args)
            if phase in _NESTED:
                self._backward_seen = True
                calls = self._calls
            else:
                calls = self._calls if threading.get_ident() == self._home else self._other_threads
            if len(calls) < MAX_CALLS_PER_STEP:
                calls.append((identity, size))
                if self.capturer.running:
                    self.capturer.saw(op, identity, len(calls) if calls is self._calls else 0)
            else:
                self._dropped_calls += 1
            self.cost.sinks_ns += perf_counter_ns() - began
        except Exception as error:  # noqa: BLE001  the recorder may fail, the collective may not
            self._fail(error)

    @torch_private.uncompiled
    def _after_optimizer(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._running:
            self.capturer.close()  # what could not be taken away from inside an op
        elif not self._by_hand:
            self._guard(self._optimizer_stepped)

    def _outermost_without_grad(self) -> None:
        """An outermost module call ended without gradients: a step, in a program that trains nothing."""
        if self._optimizer_seen or self._by_hand or not self._calls or threading.get_ident() != self._home:
            return
        if self._running:
            self._guard(self._end_step)

    # Steps

    def _optimizer_stepped(self) -> None:
        """Only the first optimizer after a forward or backward ends a step: several may share one backward."""
        sequence = torch_private.sequence_number()
        if sequence == self._sequence and torch_private.NODES_NUMBERED and not self._backward_seen:
            return
        self._sequence = sequence
        self._optimizer_seen = True
        self._end_step()

    def _end_step(self) -> None:
        work_began = perf_counter_ns()
        self._backward_seen = False
        calls, others = self._take_calls()
        identities, sizes = _columns(calls)
        # Before the ranges, which may forget sizes: the numbers belong to the calls just taken.
        self.completeness.step(self._ranges.steps + 1, identities, sizes, others)
        began = self._ranges.step(identities, sizes)
        self.observer.tracker.intervals.step()
        if began:
            self._facts.report()
        self.cost.sinks_ns += self.capturer.step_ended(self._ranges.steps)
        self.capturer.step_begins(self._ranges.steps + 1)
        self.cost.step(work_began, self.observer.tracker.take_hooks_ns())
        self._publish()

    def _take_calls(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Calls of the step in order; those of threads that race with it behind them, and once more by themselves."""
        calls, self._calls = self._calls, []
        others, self._other_threads = self._other_threads, []
        self._finished_calls += len(calls) + len(others)
        return calls + sorted(others), others

    def _publish(self) -> None:
        current = self._ranges.current
        self._sink.publish(
            Numbers(
                range_number=current.number if current is not None else 0,
                last_step=current.last_step if current is not None else 0,
                range_steps=current.steps if current is not None else 0,
                steps=self._ranges.steps,
                calls=self._finished_calls + self._dropped_calls,
                dropped_calls=self._dropped_calls + self._ranges.dropped_calls,
                dropped_steps=self._ranges.dropped_steps,
                expected_calls=self.completeness.expected,
                unverified_calls=self.completeness.unverified,
                unattributed_calls=self.completeness.unattributed,
                recording_ns=self.cost.recording_ns,
                elapsed_ns=self.cost.elapsed_ns,
                request=self.capturer.request,
            )
        )

    # Failure

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  the recorder may fail, the job's step may not
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if raised_by_signal(error):
            raise error
        if self._running:
            self._running = False
            self._on_error(error)

    def _in_child(self) -> None:
        """A forked worker records nothing; hooks it inherited return at once."""
        self.silence()


def _columns(calls: list[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple([identity for identity, _ in calls]), tuple([size for _, size in calls])
