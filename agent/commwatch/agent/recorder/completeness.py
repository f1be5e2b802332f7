"""Compares what was recorded with what torch itself counted, for each process group and step.

The second source is the sequence number of a process group, which its backend advances whenever it is given work.
Calls of C++ that pass the dispatcher by show up as expected and not recorded. Proved on torch 2.13.0:

* gloo: starts at 0. Every kind advances it once, send, recv and barrier too, coalesced calls once altogether, except
  ``reduce_scatter_`` of lists (once for each rank of the group) and ``reduce_scatter_tensor_coalesced_`` (once for each
  tensor). ``monitored_barrier_`` advances it by another number on each rank: a step with one is left out for its group;
* fake: has none. NCCL and every other backend: not proved, so not used; nor is Flight Recorder, which NCCL alone has.
  A group with several backends has one number for each, and no call says which it used: not used either.

A call that is captured into a CUDA graph is one of its step on both sides; replays of the graph are on neither. So
equal counts prove nothing where a graph holds collectives, and their number is told beside them.

``symm_mem`` calls never reach a backend: left out on both sides. Numbers are read when a step ends, and once when a
group is first seen; that is a read of memory (0.2 us), which waits for nothing and communicates nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from commwatch.agent.recorder import torch_private
from commwatch.agent.recorder.catalog import Op
from commwatch.agent.recorder.groups import Group
from commwatch.agent.recorder.observer import Observer
from commwatch.v1 import records_pb2

MAX_SOURCES = 256
"""Process groups whose numbers are read; calls on further ones are unverified."""

RESEND_S = 1.0
"""What changes at every step is sent no more often than this."""

SEQUENCE = "sequence"
WITH_MODULES = frozenset({"forward", "backward", "recompute", "eval"})
"""Phases whose calls come from a module."""

Calls = Sequence[tuple[int, int]]
"""(index into the observer's identities, index into its sizes) of each call."""


class Sink(Protocol):
    """Where the comparison goes."""

    def append(self, content: records_pb2.Completeness) -> bool:
        """Keep one record; False when it was dropped."""


@dataclass(slots=True)
class _Source:
    """A process group, weakly, and its number when it was read last."""

    group: weakref.ref[Any]
    identity: Group
    number: int


@dataclass(slots=True)
class Totals:
    """Of one group's finished steps. ``sourced`` is False when one of its process groups has no number."""

    group: Group
    recorded: int = 0
    expected: int = 0
    sourced: bool = True
    unequal: int = 0
    suspect: int = 0


@dataclass(slots=True)
class _Counted:
    """One step's calls by group key: how many, and by how much they advance the number (None: not known)."""

    unattributed: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    advances: dict[str, int | None] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)


def advance(op: Op, group_size: int, tensors: int) -> int | None:
    """How much one call advances gloo's number; None when that is not proved."""
    if op.name.startswith("symm_mem::"):
        return 0
    if op.name == "c10d::reduce_scatter_":
        return group_size
    if op.name == "c10d::reduce_scatter_tensor_coalesced_":
        return tensors
    if op.name == "c10d::monitored_barrier_" or op.kind == "unknown":
        return None
    return 1


class Reconciler:
    """The comparison of one rank. ``clock`` counts seconds."""

    def __init__(self, observer: Observer, sink: Sink, clock: Callable[[], float]) -> None:
        self.unattributed = 0
        self.unverified = 0
        self.unequal_steps = 0
        self.first_unequal_step = 0
        self.graph_calls = 0
        self._observer = observer
        self._sink = sink
        self._clock = clock
        self._at_start: dict[str, int] = {}
        self._sources: dict[str, _Source] = {}
        self._totals: dict[str, Totals] = {}
        self._owed: Counter[str] = Counter()
        self._lost: set[str] = set()
        self._threaded: set[str] = set()
        self._last: tuple[Any, Any, _Counted] = ((), (), _Counted())
        self._due = False
        self._sent_at: float | None = None

    def start(self) -> None:
        """Recording starts: what was issued before is not expected."""
        self._at_start = {}
        for group in torch_private.living_groups():
            number = torch_private.group_sequence(group)
            if number is not None:
                self._at_start[str(group.group_name)] = number
        for name, source in list(self._sources.items()):
            source.number = self._at_start.get(name, source.number)

    def seen(self, group: Any, identity: Group) -> None:
        """A process group is about to be used for the first time, or is known by another identity from here on."""
        name = str(group.group_name)
        totals = self._totals.get(identity.key)
        if totals is None:
            self._totals[identity.key] = totals = Totals(identity)
            self._due = True
        number = torch_private.group_sequence(group)
        if number is None:
            totals.sourced = False
            return
        known = self._sources.get(name)
        if known is not None and known.group() is group:
            if known.identity.key != identity.key:
                self._owed[known.identity.key] += number - known.number
                known.number, known.identity = number, identity
            return
        if known is not None:  # torch gives names again
            self._lost.add(known.identity.key)
        elif len(self._sources) >= MAX_SOURCES:
            totals.sourced = False
            return
        first = 0 if torch_private.group_ranks(group) else number
        self._sources[name] = _Source(weakref.ref(group), identity, self._at_start.pop(name, first))

    def step(self, step: int, identities: tuple[int, ...], sizes: tuple[int, ...], others: Calls) -> None:
        """The calls of a finished step. ``others`` are those of threads that race with it: they are among the calls."""
        counted = self._count(identities, sizes)
        self.unattributed += counted.unattributed
        for identity, _ in others:
            self._threaded.add(self._observer.identities[identity].group.key)
        advanced = self._read()
        unequal = False
        for key in counted.calls.keys() | advanced.keys():
            unequal |= self._compare(key, counted, advanced)
        if unequal:
            self.unequal_steps += 1
            self.first_unequal_step = self.first_unequal_step or step
            self._due = True
        captured, self.graph_calls = self.graph_calls, self._observer.graph_calls
        if self.graph_calls > captured:
            self._due = True
            if not captured:  # at once: steps that replay the graph must not be taken for steps without collectives
                self._sent_at = None
        if self._due:
            self._send_sometimes(step)

    def finish(self, step: int) -> None:
        """The process ends after this finished step."""
        if self._totals or self.graph_calls:
            self._sink.append(self.message(step))

    @property
    def expected(self) -> int:
        """Calls the second source counted, on the groups that have one."""
        return sum(totals.expected for totals in list(self._totals.values()) if totals.sourced)

    def message(self, step: int) -> records_pb2.Completeness:
        """The comparison as it stands."""
        return records_pb2.Completeness(
            step=step,
            groups=[
                records_pb2.GroupCompleteness(
                    group=records_pb2.Group(name=found.group.name, size=found.group.size, stride=found.group.stride),
                    recorded=found.recorded,
                    expected=found.expected if found.sourced else 0,
                    source=SEQUENCE if found.sourced else "",
                )
                for found in list(self._totals.values())[:MAX_SOURCES]
            ],
            unattributed=self.unattributed,
            unequal_steps=self.unequal_steps,
            first_unequal_step=self.first_unequal_step,
            graph_calls=self.graph_calls,
        )

    def _count(self, identities: tuple[int, ...], sizes: tuple[int, ...]) -> _Counted:
        if self._last[0] == identities and self._last[1] == sizes:
            return self._last[2]
        known, known_sizes = self._observer.identities, self._observer.sizes
        counted = _Counted()
        for (index, size), times in Counter(zip(identities, sizes, strict=True)).items():
            identity = known[index]
            key = identity.group.key
            if not identity.module and identity.phase in WITH_MODULES:
                counted.unattributed += times
            more = advance(identity.op, identity.group.size, len(known_sizes[size].inputs))
            counted.calls[key] += times
            if more == 0:
                counted.left_out[key] += times
            before = counted.advances.get(key, 0)
            counted.advances[key] = None if more is None or before is None else before + more * times
        self._last = (identities, sizes, counted)
        return counted

    def _read(self) -> Counter[str]:
        """By group key: how far the numbers of its process groups went since they were read last."""
        advanced, self._owed = self._owed, Counter()
        gone = []
        for name, source in list(self._sources.items()):  # another thread may add one
            group = source.group()
            number = torch_private.group_sequence(group) if group is not None else None
            if number is None:
                gone.append(name)
                continue
            if number != source.number:
                advanced[source.identity.key] += number - source.number
                source.number = number
        for name in gone:
            self._lost.add(self._sources.pop(name).identity.key)
        return advanced

    def _compare(self, key: str, counted: _Counted, advanced: Counter[str]) -> bool:
        """Add a group's step to its totals. True when it makes the step unequal."""
        calls = counted.calls[key]
        totals = self._totals.get(key)
        if totals is None:  # given by name alone, or beyond a limit
            self.unverified += calls
            return False
        advances = counted.advances.get(key, 0)
        lost = key in self._lost
        self._lost.discard(key)
        if not totals.sourced:
            self.unverified += calls
            totals.recorded += calls
            return False
        if advances is None or (lost and advances != advanced[key]):
            self.unverified += calls
            return False
        self.unverified += counted.left_out[key]
        compared = calls - counted.left_out[key]
        totals.recorded += compared
        totals.expected += compared + advanced[key] - advances
        difference = totals.expected - totals.recorded
        if difference == totals.unequal:
            totals.suspect = difference
            return False
        # A call of another thread may be recorded and not yet counted: then the next step is equal again.
        if key in self._threaded and difference != totals.suspect:
            totals.suspect = difference
            return False
        totals.unequal = totals.suspect = difference
        return True

    def _send_sometimes(self, step: int) -> None:
        now = self._clock()
        if self._sent_at is None or now - self._sent_at >= RESEND_S:
            self._sent_at = now
            if self._sink.append(self.message(step)):
                self._due = False
