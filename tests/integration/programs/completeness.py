"""Reconciles the recorder with gloo's own numbers over every kind of call; writes <out>/<rank>.json.

Steps 1 to 3 are equal. Step 4 holds one call on the backend itself, which passes the dispatcher by. Step 5 is equal.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from commwatch.agent.recorder.recorder import Recorder
from commwatch.agent.spool.page import Numbers
from tests.unit.agent.recorder.memory_sink import MemorySink

dist: Any = torch.distributed  # its groups have no complete stubs


def every_kind(rank: int, group: Any) -> int:
    """Issue every kind once; how many calls those were."""
    size, other = 2, 1 - rank
    one, two = torch.ones(4), torch.ones(8)
    dist.all_reduce(one, group=group)
    dist.all_gather_into_tensor(two, one, group=group)
    dist.all_gather([one.clone(), one.clone()], one, group=group)
    dist.reduce_scatter_tensor(one, two, group=group)
    dist.reduce_scatter(one, [one.clone(), one.clone()], group=group)
    dist.all_to_all_single(one.clone(), one, group=group)
    dist.all_to_all([one.clone(), one.clone()], [one, one], group=group)
    dist.broadcast(one, 0, group=group)
    dist.reduce(one, 0, group=group)
    dist.gather(one, [one.clone() for _ in range(size)] if rank == 0 else None, 0, group=group)
    dist.scatter(one, [one.clone() for _ in range(size)] if rank == 0 else None, 0, group=group)
    dist.barrier(group=group)
    if rank == 0:
        dist.send(one, other, group=group)
        dist.recv(one, other, group=group)
    else:
        dist.recv(one, None, group=group)
        dist.send(one, other, group=group)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, one, other, group), dist.P2POp(dist.irecv, one.clone(), other, group)]
    ):
        work.wait()
    dist.broadcast_object_list([rank], 0, group=group)  # two: its size, then itself
    with dist.distributed_c10d._coalescing_manager(group=group):
        for _ in range(3):
            dist.all_reduce(one, group=group)
    with dist.distributed_c10d._coalescing_manager(group=group):
        for _ in range(3):
            dist.reduce_scatter_tensor(one, two, group=group)
    gathered: Any = functional.all_gather_into_tensor_coalesced([one, one], group)
    scattered: Any = functional.reduce_scatter_tensor_coalesced([two, two], "sum", [0, 0], group)
    for tensor in (*gathered, *scattered):
        tensor.wait()
    return 22


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.all_reduce(torch.ones(1))  # before recording: not expected
    errors: list[BaseException] = []
    sink = MemorySink()
    recorder = Recorder(sink, Path.cwd(), errors.append)
    recorder.observer.groups.learn_mesh(mesh)
    recorder.start()
    pair = dist.new_group([0, 1], group_desc="pair")
    world = dist.group.WORLD
    found: dict[str, Any] = {"calls": []}

    def step(calls: int) -> None:
        found["calls"].append(calls)
        recorder.step()

    step(every_kind(rank, world))
    step(every_kind(rank, pair))
    dist.monitored_barrier()
    dist.all_reduce(torch.ones(1), group=pair)
    step(2)
    found["before"] = numbers(sink.counters)
    world._get_backend(torch.device("cpu")).allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
    dist.all_reduce(torch.ones(1))
    step(1)
    dist.destroy_process_group(pair)
    dist.all_reduce(torch.ones(1))
    step(1)
    recorder.stop()
    recorder.finish()
    last = sink.completeness[-1]
    found["after"] = numbers(sink.counters)
    found["groups"] = [[g.group.name, g.recorded, g.expected, g.source] for g in last.groups]
    found["unequal"] = [last.unequal_steps, last.first_unequal_step, last.step, last.unattributed]
    found["errors"] = [repr(error) for error in errors]
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    # gloo's threads drop their last tensors a moment after a collective; torch aborts when Python ends meanwhile.
    time.sleep(0.3)
    dist.destroy_process_group()


def numbers(counters: Numbers) -> list[int]:
    return [counters.calls, counters.expected_calls, counters.unverified_calls]


main()
