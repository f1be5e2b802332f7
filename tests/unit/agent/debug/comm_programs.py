"""Programs run under both CommDebugModes, and torch's mode kept from listing the ops of its own hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule, MLPStacked, ModelArgs, Transformer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import BackwardHook

Program = Callable[[], Any]
World = Callable[..., DeviceMesh]

c10d = torch.ops.c10d
functional = torch.ops.c10d_functional


coalescing: Any = dist.distributed_c10d._coalescing_manager


def world() -> Any:
    return dist.group.WORLD


def own_module_counts(mode: Any) -> dict[tuple[str, str], dict[Any, int]]:
    """(module, direction) -> counts, without the empty ones, of what each module issued itself."""
    return nonempty(mode.comm_module_own_counts)


def nonempty(counts: Any) -> dict[tuple[str, str], dict[Any, int]]:
    return {
        (name, direction): dict(found)
        for name, directions in counts.items()
        for direction, found in directions.items()
        if found
    }


TorchMode: Any = TorchCommDebugMode
"""Untyped in torch."""


class QuietTorchCommDebugMode(TorchMode):  # type: ignore[misc]  # a base without a type
    """torch's mode as it is, but its hooks' own ops run without any mode.

    It reads parameters' data in its pre-hook, four times each, and wraps modules' outputs in a node of its own: a
    detach and a view each, which it would list among the program's ops.
    """

    def __init__(self) -> None:
        super().__init__()
        tracker = self.advanced_module_tracker
        before = tracker._fw_pre_hook

        def quietly_before(module: nn.Module, args: Any) -> None:
            with _disable_current_modes():
                before(module, args)

        tracker._fw_pre_hook = quietly_before

    def __enter__(self) -> Any:
        hook: Any = BackwardHook
        self._wrapping = {name: getattr(hook, name) for name in ("setup_input_hook", "setup_output_hook")}
        for name, wrap in self._wrapping.items():
            setattr(hook, name, _quiet(wrap))
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        for name, wrap in self._wrapping.items():
            setattr(BackwardHook, name, wrap)


def _quiet(wrap: Any) -> Any:
    def quietly(*args: Any) -> Any:
        with _disable_current_modes():
            return wrap(*args)

    return quietly


class Reduced(nn.Module):
    """A linear layer whose output is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> Any:
        return funcol.all_reduce(self.linear(value), "sum", world())


class Trio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = MLPModule("cpu")

    def forward(self, value: torch.Tensor) -> Any:
        value = funcol.all_gather_tensor(value, 0, world())
        value = funcol.reduce_scatter_tensor(value, "sum", 0, world())
        return funcol.all_reduce(self.model(value), "sum", world())


def trio(_mesh: DeviceMesh) -> Program:
    model, value = Trio(), torch.randn(20, 10)
    return lambda: model(value)


def trio_backward(_mesh: DeviceMesh) -> Program:
    model, value = Trio(), torch.randn(20, 10)
    return lambda: model(value).sum().backward()


def mlp(mesh: DeviceMesh, grad: bool = False, sequence_parallel: bool = False) -> Program:
    shard = Shard(0) if sequence_parallel else None
    colwise = ColwiseParallel(input_layouts=shard)
    plan: Any = {"net1": colwise, "net2": RowwiseParallel(output_layouts=shard)}
    model = parallelize_module(MLPModule("cpu"), mesh, plan)
    value = torch.rand(8, 10, requires_grad=grad)
    return lambda: model(value).sum().backward()


def mlp_with_input_grad(mesh: DeviceMesh) -> Program:
    return mlp(mesh, grad=True)


def sequence_parallel(mesh: DeviceMesh) -> Program:
    return mlp(mesh, sequence_parallel=True)


def sequence_parallel_with_input_grad(mesh: DeviceMesh) -> Program:
    return mlp(mesh, grad=True, sequence_parallel=True)


def stacked(mesh: DeviceMesh) -> Program:
    plan: Any = {
        f"layers.{layer}.{name}": style
        for layer in range(2)
        for name, style in (("net1", ColwiseParallel()), ("net2", RowwiseParallel()))
    }
    model = parallelize_module(MLPStacked("cpu"), mesh, plan)
    value = torch.rand(8, 10)
    return lambda: model(value)


def two_models(mesh: DeviceMesh) -> Program:
    first, second = mlp(mesh), stacked(mesh)

    def run() -> None:
        first()
        second()

    return run


def inference(mesh: DeviceMesh) -> Program:
    model = parallelize_module(MLPModule("cpu"), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    value = torch.rand(8, 10)

    def run() -> None:
        with torch.inference_mode():
            model(value)

    return run


def dropout(mesh: DeviceMesh) -> Program:
    sharded: Any = distribute_tensor(torch.rand(8, 8), mesh, [Shard(0)])
    dropped: Any = nn.functional.dropout
    return lambda: dropped(sharded, 0.5).full_tensor()


def fake(_mesh: DeviceMesh) -> Program:
    def run() -> None:
        with FakeTensorMode():
            Trio()(torch.rand(20, 10)).sum().backward()

    return run


def transformer(mesh: DeviceMesh, sequence: bool = False, backward: bool = False) -> Program:
    model = Transformer(ModelArgs(dropout_p=0.0))
    Transformer.parallelize(model, mesh, sequence, local_output_for_attn=True)
    tokens = torch.randint(0, 8, (8, 8))

    def run() -> None:
        with sdpa_kernel(SDPBackend.MATH):  # DTensor has no strategy for the CPU's flash kernel
            result = model(tokens)
        if backward:
            result.sum().backward()

    return run


def transformer_sequence_parallel(mesh: DeviceMesh) -> Program:
    return transformer(mesh, sequence=True)


def transformer_backward(mesh: DeviceMesh) -> Program:
    return transformer(mesh, backward=True)


def fsdp2(_mesh: DeviceMesh, backward: bool = False) -> Program:
    model = Transformer(ModelArgs(dropout_p=0.0))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    tokens = torch.randint(0, 8, (8, 8))

    def run() -> None:
        result = model(tokens)
        if backward:
            result.sum().backward()

    return run


def plain(_mesh: DeviceMesh) -> Program:
    value, all_values = torch.rand(4, 4), torch.empty(16, 4)
    parts = [torch.empty(4, 4) for _ in range(4)]

    def run() -> None:
        dist.all_reduce(value)
        dist.all_gather_into_tensor(all_values, value)
        dist.reduce_scatter_tensor(value, all_values)
        dist.broadcast(value, 0)
        dist.gather(value, parts, 0)
        dist.reduce(value, 0)
        dist.scatter(value, parts, 0)
        dist.all_gather(parts, value)
        dist.reduce_scatter(value, parts)
        dist.all_to_all_single(value, value.clone())
        dist.all_to_all(parts, [part.clone() for part in parts])
        with coalescing():
            dist.all_gather_into_tensor(all_values, value)

    return run


def redistributes(mesh: DeviceMesh) -> Program:
    sharded: Any = distribute_tensor(torch.rand(8, 8), mesh, [Shard(0)])
    other = distribute_tensor(torch.rand(8, 8), mesh, [Shard(0)])

    def run() -> None:
        (sharded @ other).full_tensor()
        sharded.redistribute(placements=[Shard(1)])

    return run


class Checkpointed(nn.Module):
    """Two reduced layers with an op between them, all run again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = Reduced(), Reduced(), reentrant

    def _layers(self, value: torch.Tensor) -> Any:
        return self.second(self.first(value).relu())

    def forward(self, value: torch.Tensor) -> Any:
        return checkpoint(self._layers, value, use_reentrant=self.reentrant)
