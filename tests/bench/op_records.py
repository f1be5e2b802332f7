"""Op-level recording of the toy's step: ours against torch's DebugMode with the same flags."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._debug_mode import DebugMode as TorchDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from commwatch.agent.debug import DebugMode
from tests.bench import timing, toy

FLAGS: dict[str, dict[str, Any]] = {
    "default flags": {},
    "with modules and ids": {"record_nn_module": True, "record_ids": True},
    "with stacks": {"record_stack_trace": True},
}
FLAT_STEPS = 1000


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if DTensor in types else func(*args, **(kwargs or {}))


def rows() -> Iterator[str]:
    """For each set of flags: added time over the bare step, per record, and bytes per record."""
    warnings.simplefilter("ignore")
    toy.start_world()
    step = toy.make_step()
    for _ in range(3):
        step()
    nothing: Any = Nothing
    for name, flags in FLAGS.items():
        found = timing.interleaved(
            step,
            {
                "bare": contextlib.nullcontext,
                "do-nothing mode": nothing,
                "torch's DebugMode": lambda flags=flags: TorchDebugMode(**flags),  # type: ignore[misc]
                "ours": lambda flags=flags: DebugMode(**flags),  # type: ignore[misc]
            },
            blocks=8,
            repeats=6,
            fresh=frozenset({"torch's DebugMode", "ours"}),
        )
        yield from _report(name, step, flags, found)
    yield _flat(step)
    dist.destroy_process_group()


def _report(name: str, step: Callable[[], None], flags: dict[str, Any], found: dict[str, float]) -> Iterator[str]:
    bare, nothing = found["bare"], found["do-nothing mode"]
    records, bytes_each = {}, {}
    for label, kind in (("torch's DebugMode", TorchDebugMode), ("ours", DebugMode)):
        records[label], bytes_each[label] = _bytes(step, kind(**flags))
    yield f"toy step {name}: {records['ours']} records (median of 48, interleaved)"
    for label, seconds in found.items():
        line = f"  {label:18s} {1e3 * seconds:8.2f} ms  added {1e3 * (seconds - bare):7.2f} ms"
        if label in records:
            each = 1e6 * (seconds - nothing) / records[label]
            line += f"  {each:6.2f} us a record over the do-nothing mode  {bytes_each[label]:6.0f} bytes a record"
        yield line
    ratio = (found["torch's DebugMode"] - bare) / (found["ours"] - bare)
    yield f"  torch's DebugMode adds {ratio:.2f} times what ours adds"


def _bytes(step: Callable[[], None], mode: Any) -> tuple[int, float]:
    """(records of a step, bytes they hold)."""
    with mode:
        step()
    mode.reset()
    gc.collect()
    tracemalloc.start()
    with mode:
        step()
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    count = len(mode.operators)
    mode.reset()
    gc.collect()
    held -= tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return count, held / count


def _flat(step: Callable[[], None]) -> str:
    mode = DebugMode()

    def recorded() -> None:
        with mode:
            step()
        mode.reset()

    tracemalloc.start()
    for _ in range(100):
        recorded()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(FLAT_STEPS):
        recorded()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return f"memory over {FLAT_STEPS} recorded steps, reset after each: {grown / FLAT_STEPS:+.1f} bytes a step"
