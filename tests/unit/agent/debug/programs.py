"""Programs to run under torch's modes and ours: each call builds everything anew, so that both see the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule, ModelArgs, Transformer
from torch.utils.checkpoint import checkpoint

Program = Callable[[], Any]
Mesh = Callable[..., DeviceMesh]


def _local(mesh: DeviceMesh, shape: tuple[int, ...], placements: list[Any], *, grad: bool = False) -> DTensor:
    return DTensor.from_local(torch.ones(shape, requires_grad=grad), mesh, placements, run_check=False)


def mm(mesh: DeviceMesh) -> Program:
    """``mm`` of two tensors that are both sharded on their first dimension."""
    x, y = _local(mesh, (1, 8), [Shard(0)]), _local(mesh, (1, 32), [Shard(0)], grad=True)
    return lambda: torch.mm(x, y).sum()


def mm_backward(mesh: DeviceMesh) -> Program:
    x, y = _local(mesh, (1, 8), [Shard(0)], grad=True), _local(mesh, (1, 32), [Shard(0)], grad=True)
    return lambda: torch.mm(x, y).sum().backward()


def add_sharded_apart(mesh: DeviceMesh) -> Program:
    x, y = _local(mesh, (1, 8), [Shard(0)], grad=True), _local(mesh, (8, 1), [Shard(1)], grad=True)
    return lambda: (x + y).sum().backward()


def einsum(mesh: DeviceMesh) -> Program:
    """On a 2-D mesh, each factor partial on the other's dimension."""
    a = _local(mesh, (16, 6, 8), [Partial(), Replicate()])
    b = _local(mesh, (8, 4, 4), [Replicate(), Partial()])
    return lambda: torch.einsum("bld,dnh->blnh", a, b)


def redistributes(mesh: DeviceMesh) -> Program:
    x = _local(mesh, (8, 8), [Shard(0)])

    def run() -> None:
        x.redistribute(mesh, [Replicate()]).redistribute(mesh, [Shard(1)]).full_tensor()
        _local(mesh, (8, 8), [Partial()]).redistribute(mesh, [Shard(0)])

    return run


def redistribute_two_dimensions(mesh: DeviceMesh) -> Program:
    x = _local(mesh, (4, 8), [Shard(0), Shard(0)])

    def run() -> None:
        x.redistribute(mesh, [Shard(1), Replicate()])
        x.redistribute(mesh, [Replicate(), Shard(1)])

    return run


def linear() -> Program:
    model, x = nn.Linear(8, 8), torch.ones(8, 8, 8)
    return lambda: model(x).sum()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.last = Pair(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.pair(x))
        return out


def modules() -> Program:
    model, x = Outer(), torch.ones(4, 4)
    return lambda: model(x).sum().backward()


def optimizer_step() -> Program:
    model = Outer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)

    def run() -> None:
        model(torch.ones(4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def indexing_and_outputs() -> Program:
    """Tuples, lists, dictionaries of tensors, scalars, dtypes, several outputs and none."""
    x = torch.arange(12.0).view(3, 4)

    def run() -> None:
        x.max(dim=1)
        x.split([1, 2])
        torch.stack([x, x]).unbind(0)
        x[1:, torch.tensor([0, 2])].to(torch.bfloat16)
        torch.where(x > 3)
        x.add_(1).zero_()
        torch.empty(2, 0, dtype=torch.int64)
        torch.nn.functional.pad(x, (1, 1), value=2.0)
        x.sum().item()

    return run


def fake_tensors() -> Program:
    with FakeTensorMode():
        x, y = torch.randn(8, 8), torch.randn(8, 8, 8)
    return lambda: torch.matmul(y, x)


def fake_linear_backward() -> Program:
    mode = FakeTensorMode()

    def run() -> None:
        with mode:
            model = nn.Linear(4, 4)
            model(torch.ones(2, 4)).sum().backward()

    return run


def record_functions() -> Program:
    def run() -> None:
        with torch.profiler.record_function("outer"):
            torch.ones(2) + 1
            with torch.profiler.record_function("inner"):
                torch.ones(2) * 2
        torch.zeros(1)

    return run


def checkpointed() -> Program:
    model, x = Outer(), torch.ones(4, 4, requires_grad=True)
    return lambda: checkpoint(model, x, use_reentrant=False).sum().backward()


def checkpointed_reentrant() -> Program:
    model, x = Outer(), torch.ones(4, 4, requires_grad=True)
    return lambda: checkpoint(model, x, use_reentrant=True).sum().backward()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def autograd_function() -> Program:
    x = torch.ones(3, requires_grad=True)

    def run() -> None:
        apply: Any = Scaled.apply
        out = apply(x)
        torch.autograd.grad(out.sum(), x)

    return run


def functional_collectives(mesh: DeviceMesh) -> Program:
    def run() -> None:
        x = torch.ones(8, 4)
        gathered = functional.all_gather_tensor(x, 0, mesh)
        functional.all_reduce(functional.reduce_scatter_tensor(gathered, "sum", 0, mesh), "sum", mesh) + 1

    return run


def plain_collectives(mesh: DeviceMesh) -> Program:
    def run() -> None:
        x = torch.ones(4)
        torch.distributed.all_reduce(x)
        torch.distributed.all_gather([torch.empty(4) for _ in range(mesh.size())], x)
        torch.distributed.barrier()

    return run


def mlp_tensor_parallel(mesh: DeviceMesh) -> Program:
    model = parallelize_module(MLPModule("cpu"), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    x = torch.ones(4, 10, requires_grad=True)
    return lambda: model(x).sum().backward()


class NormedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.w1, self.w2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(torch.relu(self.w1(self.norm(x))))
        return out


def sequence_parallel(mesh: DeviceMesh) -> Program:
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "w1": ColwiseParallel(input_layouts=Shard(0)),
        "w2": RowwiseParallel(output_layouts=Shard(0)),
    }
    model = parallelize_module(NormedMLP(), mesh, plan)
    x = torch.ones(4, 16, requires_grad=True)
    return lambda: model(x).sum().backward()


def fsdp2(mesh: DeviceMesh) -> Program:
    model = nn.Sequential(NormedMLP(), NormedMLP())
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()

    return run


def transformer_tensor_parallel(mesh: DeviceMesh) -> Program:
    args = ModelArgs(dropout_p=0.0)
    model = Transformer.parallelize(Transformer(args), mesh, use_seq_parallel=False, local_output_for_attn=True)
    tokens = torch.zeros((2, 4), dtype=torch.int64)

    def run() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            model(tokens).sum().backward()

    return run


def loss_parallel_step(mesh: DeviceMesh) -> Program:
    logits = distribute_tensor(torch.ones(4, 16, requires_grad=True), mesh, [Shard(1)])
    target = torch.zeros(4, dtype=torch.int64)

    def run() -> None:
        with loss_parallel():
            loss: Any = nn.functional.cross_entropy(logits, target)
            loss.backward()

    return run


def caught_exception() -> Program:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x + 1
            raise ValueError

    model = nn.Sequential(Pair(), Raises())

    def run() -> None:
        try:
            model(torch.ones(4, 4))
        except ValueError:
            torch.ones(1)
        Pair()(torch.ones(4, 4))

    return run


def compiled() -> Program:
    function = torch.compile(lambda x: x.sin().cos(), backend="aot_eager")
    x = torch.ones(8)
    function(x)
    return lambda: function(x) + 1
