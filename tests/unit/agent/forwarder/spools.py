"""Spools as ranks write them."""

from __future__ import annotations

import os
from pathlib import Path

from commwatch.agent.spool.page import Numbers
from commwatch.agent.spool.writer import SpoolWriter
from tests.contract.wire_samples import L, P, S, hello, step_range


def write_ranges(spool: SpoolWriter, count: int, first: int = 1, padding: int = 0) -> None:
    """Ranges of the sample pattern, each of one step; the page says so. ``padding`` bytes make a range larger."""
    for body in (L, S, P):
        spool.define(body.kind, body.content)
    for number in range(first, first + count):
        message = step_range(number, number, number)
        if padding:
            message.ClearField("shapes_hash")
            for call in range(padding // 4):
                message.statistics.add(call=call % 100 + 1)
        assert spool.append(message)
    last = first + count - 1
    spool.publish(Numbers(range_number=last, last_step=last, range_steps=1, steps=last, calls=3 * last))


def make_spool(
    folder: Path, frames: int = 3, *, ending: str = "clean", detail: str = "", run: int = 1, rank: int = 0, pid: int = 0
) -> Path:
    """A finished spool below ``folder``; ``ending`` "" leaves it as SIGKILL does."""
    who = hello(run=run, rank=rank, world_size=rank + 1, pid=pid or os.getpid(), hostname=os.uname().nodename)
    who.ClearField("commit")
    spool = SpoolWriter(folder / who.run_id / f"0-{rank}", who, 1 << 22)
    write_ranges(spool, frames)
    if ending:
        spool.close(ending, detail)
    return spool.folder
