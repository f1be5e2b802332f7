"""Step time of the toy: bare, with the agent, with torch's two modes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._debug_mode import DebugMode

from commwatch.agent import record
from tests.bench import timing, toy


def rows() -> Iterator[str]:
    """One line for each variant, with its ratio to the bare step."""
    warnings.simplefilter("ignore")
    toy.start_world()
    step = toy.make_step()
    for _ in range(3):
        step()
    with record() as seen:
        step()
    calls = len(seen.calls())
    with toy.agent() as recorder:
        found = timing.interleaved(
            step,
            {
                "bare": contextlib.nullcontext,
                "agent": lambda: toy.recording(recorder),
                "CommDebugMode": CommDebugMode,
                "DebugMode": DebugMode,
            },
            blocks=12,
            repeats=8,
            fresh=frozenset({"CommDebugMode", "DebugMode"}),
        )
    bare = found["bare"]
    yield f"step of the FSDP2 + tensor-parallel toy, {calls} collectives (median of 96, interleaved)"
    for name, seconds in found.items():
        yield f"  {name:14s} {1e3 * seconds:8.2f} ms   {seconds / bare:5.2f}x   added {1e3 * (seconds - bare):7.3f} ms"
    share = (found["agent"] - bare) / (found["CommDebugMode"] - bare)
    yield f"  the agent adds {share:.3f} of what CommDebugMode adds"
    dist.destroy_process_group()
