"""Folds finished steps into step ranges: a steady job adds one counter a step, whatever its length.

Growth is bounded three times over:

* a pattern gets at most ``PRECISE_RANGES`` ranges of consecutive steps with equal shapes. After that (patterns that
  alternate, shapes that change at every step) one last range takes all its further steps, with statistics of bytes;
* a rank reports at most ``MAX_PATTERNS`` patterns. Steps of further ones go to windows of ``WINDOW_STEPS`` steps,
  with counts and bytes by call and without order: the rank is unstable;
* what waits to be sent again is sent at most once every ``RESEND_S`` seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from commwatch.agent.recorder import wire
from commwatch.agent.recorder.observer import Identity, Observer
from commwatch.v1 import records_pb2

PRECISE_RANGES = 16
MAX_PATTERNS = 1_000
WINDOW_STEPS = 100
RESEND_S = 1.0


Content: TypeAlias = records_pb2.StepRange | records_pb2.Facts | records_pb2.Completeness | records_pb2.Capture
"""What a frame may hold."""


class Sink(Protocol):
    """Where records go: the spool."""

    def define(self, kind: int, content: bytes) -> bytes:
        """Keep a content-addressed body; returns its 16-byte hash."""

    def append(self, content: Content) -> bool:
        """Keep one record; False when it was dropped."""


@dataclass(slots=True)
class Pattern:
    """A pattern of this process. ``calls`` are identities in order of first appearance."""

    hash: bytes
    calls: tuple[int, ...]
    order: tuple[int, ...]
    lines_hash: bytes
    line_count: int
    precise: int = 0
    merged: Range | None = None


@dataclass(slots=True)
class Range:
    """Steps of one pattern.

    ``sizes`` are those of its newest step. When ``varies``, ``statistics`` maps a position in the pattern's calls to
    [count, sum, min, max] of payload bytes, and the newest ``unsettled`` steps, equal in sizes, are not in it yet.
    """

    number: int
    pattern: Pattern
    first_step: int
    last_step: int
    steps: int
    sizes: tuple[int, ...] | None
    shapes_hash: bytes
    varies: bool = False
    statistics: dict[int, list[int]] = field(default_factory=dict)
    statistics_steps: int = 0
    unsettled: int = 0
    unfinished: bool = False
    sent_steps: int = 0

    def message(self) -> records_pb2.StepRange:
        """The record as it stands."""
        return records_pb2.StepRange(
            number=self.number,
            first_step=self.first_step,
            last_step=self.last_step,
            steps=self.steps,
            pattern_hash=self.pattern.hash,
            shapes_hash=self.shapes_hash,
            lines_hash=self.pattern.lines_hash,
            statistics=[
                records_pb2.BytesStatistics(call=call, count=count, sum=total, min=least, max=most)
                for call, (count, total, least, most) in sorted(self.statistics.items())
            ],
            statistics_steps=self.statistics_steps,
            unfinished=self.unfinished,
        )

    def add(self, call: int, payload_bytes: int, times: int = 1) -> None:
        """Count one call of ``times`` equal steps."""
        found = self.statistics.get(call)
        if found is None:
            self.statistics[call] = [times, times * payload_bytes, payload_bytes, payload_bytes]
            return
        found[0] += times
        found[1] += times * payload_bytes
        found[2] = min(found[2], payload_bytes)
        found[3] = max(found[3], payload_bytes)


class Ranges:
    """The step ranges of one rank. ``clock`` counts seconds."""

    def __init__(self, observer: Observer, sink: Sink, clock: Callable[[], float]) -> None:
        self.steps = 0
        self.current: Range | None = None
        self.dropped_steps = 0
        self.dropped_calls = 0
        self._observer = observer
        self._sink = sink
        self._clock = clock
        self._patterns: dict[tuple[int, ...], Pattern] = {}
        self._numbers = 0
        self._grown: dict[int, Range] = {}
        self._sent_at = clock()
        self._window: Range | None = None
        self._window_calls: dict[int, int] = {}

    def step(self, identities: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
        """A step ended with these calls. True when it began a range, so that facts may have changed."""
        self.steps += 1
        current = self.current
        pattern = self._patterns.get(identities)
        began = False
        if current is not None and pattern is current.pattern and current.sizes == sizes:
            current.last_step = self.steps
            current.steps += 1
            if current.varies:
                current.unsettled += 1
                self._grown[current.number] = current
        else:
            began = self._switch(identities, sizes, pattern)
        if self._grown and self._clock() - self._sent_at >= RESEND_S:
            self.flush()
        if self._observer.sizes_full():
            self.flush()
            self._observer.forget_sizes()
        return began

    def finish(self, identities: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """The process ends with these calls after the last finished step."""
        self.flush()
        if not identities:
            return
        pattern = self._patterns.get(identities) or self._learn(identities)
        step = self.steps + 1
        self._numbers += 1
        shapes_hash = self._shapes(pattern, sizes)
        self._emit(Range(self._numbers, pattern, step, step, 0, sizes, shapes_hash, unfinished=True))

    def flush(self) -> None:
        """Send the open range and every other one that grew since it was sent."""
        if self.current is not None and self.current.steps > 1:
            self._grown[self.current.number] = self.current
        for grown in list(self._grown.values()):
            self._emit(grown)
        self._sent_at = self._clock()

    def _switch(self, identities: tuple[int, ...], sizes: tuple[int, ...], pattern: Pattern | None) -> bool:
        """The step differs from the one before it. True when a range began."""
        self._leave()
        if pattern is None:
            if len(self._patterns) >= MAX_PATTERNS:
                self._add_to_window(identities, sizes)
                return False
            pattern = self._learn(identities)
        self._refresh_lines(pattern)
        if pattern.precise < PRECISE_RANGES:
            pattern.precise += 1
            self._begin(Range(0, pattern, self.steps, self.steps, 1, sizes, self._shapes(pattern, sizes)))
            return True
        if pattern.merged is None:
            pattern.merged = Range(0, pattern, self.steps, self.steps, 1, sizes, b"", varies=True, unsettled=1)
            self._begin(pattern.merged)
            return True
        merged = self.current = pattern.merged
        self._settle(merged)
        merged.last_step = self.steps
        merged.steps += 1
        merged.sizes = sizes
        merged.unsettled = 1
        self._grown[merged.number] = merged
        return False

    def _leave(self) -> None:
        """The open range ends here, or rests. A precise one is sent with its final length at once."""
        ended = self.current
        if ended is None or ended.varies:
            return
        if ended.steps > ended.sent_steps:
            self._emit(ended)
        lost = ended.steps - ended.sent_steps
        self.dropped_steps += lost
        self.dropped_calls += lost * len(ended.pattern.order)

    def _begin(self, began: Range) -> None:
        self._numbers += 1
        began.number = self._numbers
        self.current = began
        self._emit(began)

    def _emit(self, grown: Range) -> None:
        if grown is self._window:
            grown.pattern = self._window_pattern(grown.pattern)
        self._settle(grown)
        if self._sink.append(grown.message()):
            grown.sent_steps = grown.steps
            self._grown.pop(grown.number, None)

    def _settle(self, merged: Range) -> None:
        """Put the newest steps into the statistics."""
        if not merged.unsettled or merged.sizes is None:
            return
        pattern, known = merged.pattern, self._observer.sizes
        for call, size in zip(pattern.order, merged.sizes, strict=True):
            merged.add(call, known[size].payload_bytes, merged.unsettled)
        merged.statistics_steps += merged.unsettled
        merged.unsettled = 0

    def _add_to_window(self, identities: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Count the step in the open window. A window's calls are those of every window so far: few distinct sets."""
        calls, known = self._window_calls, self._observer.sizes
        for identity in identities:
            calls.setdefault(identity, len(calls))
        began = self._window is None
        if self._window is None:
            none = Pattern(b"", (), (), b"", 0)
            self._window = Range(0, none, self.steps, self.steps, 0, None, b"", varies=True)
        window = self._window
        for identity, size in zip(identities, sizes, strict=True):
            window.add(calls[identity], known[size].payload_bytes)
        window.last_step = self.steps
        window.steps += 1
        window.statistics_steps += 1
        if began:
            self._begin(window)
        self.current = window
        self._grown[window.number] = window
        if window.steps >= WINDOW_STEPS:
            self._emit(window)
            self._window = None

    def _window_pattern(self, known: Pattern) -> Pattern:
        calls = tuple(self._window_calls)
        return known if known.calls == calls else self._define(calls, (), unordered=True)

    def _learn(self, identities: tuple[int, ...]) -> Pattern:
        calls = tuple(dict.fromkeys(identities))
        position = {identity: index for index, identity in enumerate(calls)}
        found = self._define(calls, tuple(position[identity] for identity in identities), unordered=False)
        self._patterns[identities] = found
        return found

    def _define(self, calls: tuple[int, ...], order: tuple[int, ...], *, unordered: bool) -> Pattern:
        known = [self._observer.identities[identity] for identity in calls]
        pattern_hash = self._sink.define(wire.PATTERN, wire.pattern(known, order, unordered=unordered))
        found = Pattern(pattern_hash, calls, order, b"", -1)
        self._define_lines(found, known)
        return found

    def _define_lines(self, pattern: Pattern, known: list[Identity]) -> None:
        pattern.line_count = sum(len(identity.lines) for identity in known)
        content = wire.lines(pattern.hash, [identity.lines for identity in known])
        pattern.lines_hash = self._sink.define(wire.LINES, content)

    def _refresh_lines(self, pattern: Pattern) -> None:
        """A pattern begins again: by now it may have been reached from further lines."""
        known = [self._observer.identities[identity] for identity in pattern.calls]
        if pattern.line_count != sum(len(identity.lines) for identity in known):
            self._define_lines(pattern, known)

    def _shapes(self, pattern: Pattern, sizes: tuple[int, ...]) -> bytes:
        distinct = tuple(dict.fromkeys(sizes))
        position = {size: index for index, size in enumerate(distinct)}
        known = [self._observer.sizes[size] for size in distinct]
        return self._sink.define(wire.SHAPES, wire.shapes(pattern.hash, known, [position[size] for size in sizes]))
