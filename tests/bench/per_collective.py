"""Added time for each collective: 100 all_reduce calls two modules deep, where nothing else happens."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from commwatch.agent.recorder import interpose
from tests.bench import timing, toy

CALLS = 100


class Reducing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(CALLS):
            dist.all_reduce(x)
        return x


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def interposition_alone() -> Iterator[None]:
    """The kernels, with a sink that looks at nothing."""

    def ignore(op: Any, args: Any) -> None:
        return None

    interpose.add(ignore)
    try:
        yield
    finally:
        interpose.remove(ignore)


def rows() -> Iterator[str]:
    """One line for each variant: microseconds over the bare call."""
    warnings.simplefilter("ignore")
    toy.start_world()
    outer = nn.Sequential(Reducing())
    tensor = torch.ones(64)

    def work() -> None:
        outer(tensor)

    with toy.agent() as recorder:
        found = timing.interleaved(
            work,
            {
                "bare": contextlib.nullcontext,
                "interposition alone": interposition_alone,
                "agent: module, cause, line": lambda: toy.recording(recorder, by_hand=True),
                "do-nothing dispatch mode": Nothing,
                "CommDebugMode": CommDebugMode,
                "DebugMode": DebugMode,
            },
            blocks=12,
            repeats=4,
            fresh=frozenset({"CommDebugMode", "DebugMode"}),
        )
    bare = found["bare"]
    yield f"added time for each collective (median of 48 x {CALLS}, interleaved)"
    reference = found["CommDebugMode"] - bare
    for name, seconds in found.items():
        added = seconds - bare
        yield f"  {name:28s} {1e6 * added / CALLS:7.2f} us   {added / reference:5.2f} of CommDebugMode"
    dist.destroy_process_group()
