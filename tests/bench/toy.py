"""The toy of the step benchmark: FSDP2 around tensor-parallel blocks, on the fake process group."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from commwatch.agent.recorder.recorder import Recorder
from commwatch.agent.spool.writer import SpoolWriter
from commwatch.v1 import ingest_pb2

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = x + self.w2(torch.relu(self.w1(self.norm(x))))
        return total


def start_world() -> None:
    """One process that stands for rank 0 of four."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())


def make_step(blocks: int = 6) -> Callable[[], None]:
    """A whole training step: forward, backward, optimizer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*[Block() for _ in range(blocks)])
    for block in model:
        parallelize_module(block, mesh["tp"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    batch = torch.randn(4, 16, WIDTH)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def recording(recorder: Recorder, *, by_hand: bool = False) -> Iterator[None]:
    """Record while the block runs. Optimizers end steps; ``by_hand``, the block is one."""
    recorder.start()
    try:
        yield
    finally:
        if by_hand:
            recorder.step()
        recorder.stop()


@contextmanager
def agent() -> Iterator[Recorder]:
    """The agent's recorder with its real spool, without a forwarder."""
    identity = hashlib.blake2b(b"bench", digest_size=16).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        hello = ingest_pb2.Hello(run_id=identity, world_size=1)
        spool = SpoolWriter(Path(folder) / "0-0", hello, 64 * 1024 * 1024)
        errors: list[BaseException] = []
        recorder = Recorder(spool, Path.cwd(), errors.append)
        yield recorder
        if errors:
            raise errors[0]
        spool.close("clean", "")
