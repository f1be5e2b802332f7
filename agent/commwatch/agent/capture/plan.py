"""Which steps are captured: those a setting names, and those somebody asks a running job for."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_CAPTURES = 1_000
"""Steps one rank captures because of its settings; those it is asked for come on top."""

MAX_RANGES = 100
_RANGE = re.compile(r"([0-9]{1,12})(?::([0-9]{1,12}))?")


@dataclass(frozen=True, slots=True)
class Plan:
    """Inclusive ranges of steps, counted from 1; ``every`` captures each step, up to ``MAX_CAPTURES``.

    ``hashes`` is how outputs are hashed in every capture: ``norm``, ``hash_tensor`` or, empty, not at all.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    every: bool = False
    hashes: str = ""

    def wants(self, step: int) -> bool:
        """Whether the settings name this step."""
        return self.every or any(first <= step <= last for first, last in self.ranges)

    @property
    def empty(self) -> bool:
        """Whether no step is named."""
        return not self.every and not self.ranges


def parse_steps(text: str) -> tuple[tuple[int, int], ...]:
    """``3,100:102`` as ranges. Raises ValueError with what is wrong."""
    ranges = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{part.strip()[:40]!r} is no step and no range such as 100:102")
        first, last = int(found[1]), int(found[2] or found[1])
        if first < 1 or last < first:
            raise ValueError(f"{part.strip()[:40]!r} must run upwards from 1 on")
        ranges.append((first, last))
    if len(ranges) > MAX_RANGES:
        raise ValueError(f"{len(ranges)} ranges, more than {MAX_RANGES}")
    return tuple(ranges)
