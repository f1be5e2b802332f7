"""A small real training job: a DTensor MLP with activation checkpointing, clipping, evaluation and an optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule
from torch.utils.checkpoint import checkpoint

STEPS = 2


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        plan = {"net1": ColwiseParallel(input_layouts=Shard(0)), "net2": RowwiseParallel(output_layouts=Shard(0))}
        self.first = parallelize_module(MLPModule("cpu"), mesh, plan)
        self.second = parallelize_module(MLPModule("cpu"), mesh, plan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.first, x, use_reentrant=False)
        z: torch.Tensor = checkpoint(self.second, y, use_reentrant=True)
        return z


def train(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Losses and, at the end, the local parameters: all that the job computes."""
    torch.manual_seed(0)
    model = Model(mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    results = []
    for _ in range(STEPS):
        loss = model(torch.randn(4, 10, requires_grad=True)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        adam.step()
        adam.zero_grad()
        results.append(loss.detach().clone())
    with torch.no_grad():
        results.append(model(torch.randn(4, 10)).clone())
    dist.barrier()
    results += [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return results
