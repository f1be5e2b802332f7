"""Checks on one GPU what only a GPU can show: one rank, NCCL. Prints a line for each check; exits 1 when one failed.

python tests/gpu/check.py          where no GPU is, it says that nothing was checked, and exits 0
python tests/gpu/check.py --cpu    the same checks on gloo, without those of CUDA graphs
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.append(str(Path(__file__).parents[2]))  # run as a script, it has no package

from commwatch.agent import record
from commwatch.agent.capture.plan import Plan
from commwatch.agent.recorder.features import OP_LEVEL
from commwatch.agent.recorder.recorder import Recorder
from tests.unit.agent.recorder.memory_sink import MemorySink

REPLAYS = 3


def expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {found}, not {wanted}")


@contextmanager
def recording(plan: Plan | None = None) -> Iterator[tuple[Recorder, MemorySink]]:
    """A rank's recorder, without a spool."""
    sink, errors = MemorySink(), list[BaseException]()
    recorder = Recorder(sink, Path(__file__).parent, errors.append, plan)
    recorder.start()
    try:
        yield recorder, sink
    finally:
        recorder.stop()
    recorder.finish()
    expect("errors of the recorder", errors, [])


def phases(r: record) -> list[tuple[str, str, str]]:
    return [(call.phase, call.kind, call.module) for call in r.calls()]


def interposition(device: torch.device) -> str:
    """A collective is seen once, with its sizes, and does what it does without the recorder."""
    tensor, parts = torch.arange(4.0, device=device), torch.zeros(4, device=device)
    with record() as r:
        dist.all_reduce(tensor)
        dist.all_gather([parts], tensor)
    expect("counts", r.counts(), {"all_reduce": 1, "all_gather": 1})
    expect("results", (tensor.tolist(), parts.tolist()), ([0.0, 1.0, 2.0, 3.0],) * 2)
    first = r.calls()[0]
    expect("the call", (first.raw_op, first.inputs, first.bytes_in), ("c10d::allreduce_", ((4,),), 16))
    expect("captured calls", r.graph_calls, 0)
    return "2 collectives, each once"


def fsdp2(device: torch.device) -> str:
    """Forward and backward of two sharded layers and their root.

    One rank alone has nothing to communicate. So this one stands for one of two, on torch's fake backend: tensors,
    streams and threads are real, nothing is sent.
    """
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)).to(device)
    for part in (model[0], model[1], model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    with record() as r:
        model(torch.rand(2, 8, device=device)).sum().backward()
    counts = Counter((phase, kind) for phase, kind, _ in phases(r))
    wanted = {("forward", "all_gather"): 3, ("backward", "all_gather"): 3, ("backward", "reduce_scatter"): 3}
    expect("counts", dict(counts), wanted)
    expect("modules", {module for _, _, module in phases(r)}, {"(root)", "0", "1"})
    return "9 collectives"


def summed(x: torch.Tensor) -> torch.Tensor:
    """To be compiled."""
    total: torch.Tensor = functional.all_reduce(x + 1, "sum", [0])
    return total * 2


def compiled_region(device: torch.device) -> str:
    """A functional collective inside of a compiled region is counted when it runs."""
    compiled = torch.compile(summed, fullgraph=True)
    with record() as r:
        results = [compiled(torch.ones(4, device=device)).tolist() for _ in range(2)]
    expect("results", results, [[4.0] * 4] * 2)
    expect("counts", r.counts(), {"all_reduce": 2})
    return "2 runs, 2 collectives"


class ReduceInBackward(torch.autograd.Function):
    """Notes on which thread its backward runs."""

    threads: list[int]

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        ReduceInBackward.threads.append(threading.get_ident())
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class Reducing(nn.Linear):
    """All-reduces in its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ReduceInBackward.apply(super().forward(x))  # type: ignore[no-untyped-call]  # torch's own
        return found


def backward_thread(device: torch.device) -> str:
    """On a GPU, autograd runs backward on a thread of its own: modules are found there too."""
    model = nn.Sequential(nn.Linear(4, 4), Reducing(4, 4)).to(device)
    ReduceInBackward.threads = []
    with record() as r:
        model(torch.rand(2, 4, device=device)).sum().backward()
    elsewhere = ReduceInBackward.threads != [threading.get_ident()]
    expect("on a thread of autograd's", elsewhere, device.type == "cuda")
    expect("calls", phases(r), [("backward", "all_reduce", "1")])
    return f"on {'a thread of autograd' if elsewhere else 'the thread of the program'}"


def captured_step(device: torch.device) -> str:
    """A planned step is captured op by op, on this device."""
    missing = OP_LEVEL.lacking()
    if missing:
        return f"not possible: this torch lacks {', '.join(missing)}"
    model = nn.Sequential(nn.Linear(4, 4), Reducing(4, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(Plan(((2, 2),))) as (_, sink):
        for _ in range(3):
            model(torch.rand(2, 4, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    facts = sink.facts[-1]
    backend = "nccl" if device.type == "cuda" else "gloo"
    expect("facts", (facts.device_type, facts.backend.split()[0]), (device.type, backend))
    expect("steps", sink.steps(), [(1, 3, ["all_reduce"])])
    (capture,) = sink.captures
    expect("the capture", (capture.step, capture.dropped_records, capture.reason), (2, 0, ""))
    issued = [(c.kind, c.phase, c.module) for call in capture.calls for c in call.collectives]
    expect("its collectives", issued, [("all_reduce", "backward", "1")])
    expect("its ops", "aten::addmm" in {call.name for call in capture.calls}, True)
    return f"{len(capture.records)} records"


def cuda_graph(device: torch.device) -> str:
    """Replays are not observable, and that is what is said: not that nothing ran."""
    tensor = torch.ones(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with recording() as (recorder, sink), record() as r:
        dist.all_reduce(tensor)  # NCCL makes its communicator outside of a capture
        recorder.step()
        with torch.cuda.graph(graph):
            dist.all_reduce(tensor)
            tensor.mul_(2)
        recorder.step()
        for _ in range(REPLAYS):
            graph.replay()
            recorder.step()
        expect("replays ran", tensor.tolist(), [2.0**REPLAYS] * 4)
    graph.reset()  # before the communicator it holds goes
    expect("recorded by step", sink.steps(), [(1, 2, ["all_reduce"]), (3, 2 + REPLAYS, [])])
    expect("record()", (r.counts(), r.graph_calls), ({"all_reduce": 2}, 1))
    expect("its last line", "not observable: 1 collective was captured" in str(r).splitlines()[-1], True)
    expect("reported", sink.completeness[-1].graph_calls, 1)
    claims = [(group.recorded, group.source) for group in sink.completeness[-1].groups]
    expect("counts that no second source confirms", claims, [(2, "")])
    return f"1 collective captured, {REPLAYS} replays told as not observable"


def graph_trees(device: torch.device) -> str:
    """Graphs that torch.compile captures: what its replays hide is told."""
    compiled = torch.compile(summed, mode="reduce-overhead")
    runs = 6
    with record() as r:
        for _ in range(runs):
            torch.compiler.cudagraph_mark_step_begin()
            expect("result", compiled(torch.ones(4, device=device)).tolist(), [4.0] * 4)
    torch.compiler.reset()  # graphs go before the communicator they hold
    seen = r.counts().get("all_reduce", 0)
    expect(f"with {seen} of {runs} recorded, others are told", seen == runs or r.graph_calls > 0, True)
    return f"{seen} of {runs} runs seen, {r.graph_calls} captured"


Check = Callable[[torch.device], str]
CHECKS: tuple[Check, ...] = (interposition, compiled_region, backward_thread, captured_step)
GRAPH_CHECKS: tuple[Check, ...] = (cuda_graph, graph_trees)


def passed(check: Check, device: torch.device) -> bool:
    """Run one check and print its line."""
    try:
        note = check(device)
    except Exception as error:  # noqa: BLE001  the other checks go on
        print(f"failed  {check.__name__}: {type(error).__name__}: {error}", flush=True)
        return False
    print(f"ok      {check.__name__}: {note}", flush=True)
    return True


def main(arguments: list[str]) -> int:
    on_cpu = arguments == ["--cpu"]
    if arguments and not on_cpu:
        print(__doc__)
        return 2
    if not on_cpu and not (torch.cuda.is_available() and dist.is_nccl_available()):
        lacks = "this torch has no NCCL" if torch.cuda.is_available() else "there is no GPU"
        print(f"nothing was checked: {lacks} (--cpu checks on gloo what needs none)")
        return 0
    device = torch.device("cpu") if on_cpu else torch.device("cuda", 0)
    if not on_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if on_cpu else "nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    print(f"torch {torch.__version__} on {'the CPU' if on_cpu else torch.cuda.get_device_name(device)}", flush=True)
    results = [passed(check, device) for check in (CHECKS if on_cpu else CHECKS + GRAPH_CHECKS)]
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    results.append(passed(fsdp2, device))
    dist.destroy_process_group()
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
