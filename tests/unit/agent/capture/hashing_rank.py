"""One of two gloo ranks that hash what they run: python hashing_rank.py RANK STORE. Prints JSON.

Each rank needs what the other sends while its own collectives are in flight: whoever waited for one would wait on.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from commwatch.agent.capture.hashes import KINDS
from commwatch.agent.capture.messages import Encoder
from commwatch.agent.capture.op_capture import OpCapture
from commwatch.agent.recorder.observer import Observer


def program(rank: int) -> list[torch.Tensor]:
    other = 1 - rank
    world: Any = dist.group.WORLD
    x = torch.arange(6.0).view(2, 3) + rank
    received = torch.zeros(3)
    if rank == 0:
        receiving = dist.irecv(received, other)
        received.view(1, 3)
        total = functional.all_reduce(x, "sum", world)
        total.view(-1)
        plain = x.clone()
        reducing = dist.all_reduce(plain, async_op=True)
        plain.view(-1)
        dist.send(torch.ones(2), other)
    else:
        dist.recv(torch.zeros(2), other)
        dist.send(torch.full((3,), 5.0), other)
        receiving = None
        total = functional.all_reduce(x, "sum", world)
        plain = x.clone()
        reducing = dist.all_reduce(plain, async_op=True)
    summed = functional.wait_tensor(total)
    if receiving is not None:
        receiving.wait()
    if reducing is not None:
        reducing.wait()
    weight = torch.ones(3, requires_grad=True)
    ((summed + plain) * weight).sum().backward()
    gradient: Any = weight.grad
    dist.all_reduce(gradient)
    return [received, summed.clone(), plain, gradient]


def hashed(rank: int, kind: str) -> dict[str, Any]:
    observer = Observer(Path(__file__).parent)
    with OpCapture(observer, hashes=kind) as mode:
        results = program(rank)
    (part,) = Encoder(mode.operators, {}, observer.identities, mode.places.lines).parts()
    found = [(part.calls[record.call].name, record.output_hash) for record in part.records]
    return {"results": [result.tolist() for result in results], "failure": repr(mode.failure), "hashes": found}


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=40)
    )
    print(json.dumps({kind: hashed(rank, kind) for kind in ("", *KINDS)}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
