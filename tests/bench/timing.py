"""Interleaved timing: every variant runs in short blocks, in turn, so that a slow minute hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager


def interleaved(
    work: Callable[[], None],
    variants: dict[str, Callable[[], AbstractContextManager[object]]],
    *,
    blocks: int,
    repeats: int,
    fresh: frozenset[str] = frozenset(),
) -> dict[str, float]:
    """Median seconds of ``work`` under each variant. The first run of a block is not counted.

    ``fresh`` names variants that are entered anew for each run: modes that keep everything they saw.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(blocks):
        for name, enter in variants.items():
            if name in fresh:
                for index in range(repeats + 1):
                    with enter():
                        _time(work, seconds[name], count=index > 0)
            else:
                with enter():
                    for index in range(repeats + 1):
                        _time(work, seconds[name], count=index > 0)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _time(work: Callable[[], None], into: list[float], *, count: bool) -> None:
    start = time.perf_counter()
    work()
    if count:
        into.append(time.perf_counter() - start)
