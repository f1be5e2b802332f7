"""What the recorder itself costs the job.

Counted: the time in its collective sink, its module hooks and its step ends. Sinks and step ends are timed each time:
a pair of clock readings is 0.1 us where a sink takes some 7. A module hook takes about one, so one in ``SAMPLED`` is
timed and stands for the others; over a step of a thousand module calls that is exact to a few percent. Not counted:
what the dispatcher takes to reach a Python kernel and to come back from it, about 5 us a collective, which no clock of
the recorder's own can see.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

SAMPLED = 16
"""One module hook of so many is timed. A power of two."""


class Cost:
    """Nanoseconds of finished steps: ``recording_ns`` of ``elapsed_ns``. ``clock`` counts nanoseconds."""

    __slots__ = ("_began", "_clock", "elapsed_ns", "recording_ns", "sinks_ns")

    def __init__(self, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.recording_ns = 0
        self.elapsed_ns = 0
        self.sinks_ns = 0
        """Added to by the sinks; each step end takes it over."""
        self._clock = clock
        self._began = clock()

    def start(self) -> None:
        """Recording starts: what passed before belongs to no step."""
        self._began = self._clock()

    def step(self, began_ns: int, hooks_ns: int) -> None:
        """A step ended. Its end has been worked on since ``began_ns``; module hooks took ``hooks_ns`` of it."""
        now = self._clock()
        self.elapsed_ns += now - self._began
        self.recording_ns += self.sinks_ns + hooks_ns + now - began_ns
        self.sinks_ns = 0
        self._began = now
