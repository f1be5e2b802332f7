"""Exact counts of well-known programs, by phase and module, on the fake process group.

Models are torch's own test models; each expected number was measured with torch's tools on the same program, or is
asserted by the PyTorch test file named beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule, ModelArgs, Transformer

from commwatch.agent import record
from commwatch.agent.recorder.attribution import Cause, placements_text

World = Callable[..., DeviceMesh]
AG, RS, AR, A2A = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"


def by_phase(recorded: record) -> dict[tuple[str, str], int]:
    return dict(Counter((call.phase, call.kind) for call in recorded.calls()))


def by_module(recorded: record) -> dict[tuple[str, str, str], int]:
    return dict(Counter((call.phase, call.kind, call.module) for call in recorded.calls()))


class FunctionalTrio(nn.Module):
    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 16)
        self.net2 = nn.Linear(16, 10)
        self.world_size = world_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = functional.all_gather_tensor(x, 0, list(range(self.world_size)))
        scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, list(range(self.world_size)))
        out: torch.Tensor = functional.all_reduce(self.net2(torch.relu(self.net1(scattered))), "sum", [0, 1])
        return out


def test_functional_trio(fake_world: World) -> None:  # test_comm_mode.py
    fake_world(2)
    with record() as r:
        FunctionalTrio(2)(torch.rand(8, 10))
    assert r.counts() == {AG: 1, RS: 1, AR: 1}
    assert by_phase(r) == {("forward", AG): 1, ("forward", RS): 1, ("forward", AR): 1}
    assert {call.module for call in r.calls()} == {"(root)"}


@pytest.mark.parametrize(
    ("input_grad", "expected"),
    [
        (False, {("forward", AR, "net2"): 1}),
        (True, {("forward", AR, "net2"): 1, ("backward", AR, "net1"): 1}),
    ],
)
def test_mlp_tensor_parallel(  # test_tp_examples.py
    fake_world: World, input_grad: bool, expected: dict[tuple[str, str, str], int]
) -> None:
    mesh = fake_world(4)
    model = parallelize_module(MLPModule("cpu"), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    with record() as r:
        model(torch.rand(8, 10, requires_grad=input_grad)).sum().backward()
    assert by_module(r) == expected


@pytest.mark.parametrize(
    ("input_grad", "expected"),
    [
        (False, {("forward", AG): 1, ("forward", RS): 1, ("backward", AG): 1}),
        (True, {("forward", AG): 1, ("forward", RS): 1, ("backward", AG): 1, ("backward", RS): 1}),
    ],
)
def test_mlp_sequence_parallel(fake_world: World, input_grad: bool, expected: dict[tuple[str, str], int]) -> None:
    mesh = fake_world(4)
    plan = {"net1": ColwiseParallel(input_layouts=Shard(0)), "net2": RowwiseParallel(output_layouts=Shard(0))}
    model = parallelize_module(MLPModule("cpu"), mesh, plan)
    with record() as r:
        model(torch.rand(2, 10, requires_grad=input_grad)).sum().backward()
    assert by_phase(r) == expected


@pytest.mark.parametrize(
    ("sequence_parallel", "forward", "backward", "optimizer"),
    [
        (False, {AR: 6, AG: 1}, {AR: 9}, {}),
        (True, {RS: 6, AG: 6}, {RS: 5, AG: 6}, {AR: 30}),
    ],
)
def test_transformer(
    fake_world: World,
    sequence_parallel: bool,
    forward: dict[str, int],
    backward: dict[str, int],
    optimizer: dict[str, int],
) -> None:
    mesh = fake_world(4)
    model = Transformer(ModelArgs(dropout_p=0.0))
    Transformer.parallelize(model, mesh, sequence_parallel, local_output_for_attn=True)
    adam = torch.optim.Adam(model.parameters())
    with record() as r, sdpa_kernel(SDPBackend.MATH):  # DTensor has no strategy for the CPU's flash kernel
        model(torch.randint(0, 8, (8, 8))).sum().backward()
        adam.step()
    phases: dict[str, dict[str, int]] = {"forward": {}, "backward": {}, "optimizer": {}}
    for (phase, kind), count in by_phase(r).items():
        phases[phase][kind] = count
    assert phases == {"forward": forward, "backward": backward, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("options", "count"), [({"foreach": True}, 6), ({"foreach": False, "fused": False}, 6), ({"fused": True}, 2)]
)
def test_optimizer_flavour(fake_world: World, options: dict[str, Any], count: int) -> None:
    mesh = fake_world(4)
    model = parallelize_module(nn.Sequential(nn.LayerNorm(16)), mesh, {"0": SequenceParallel()})
    adamw = torch.optim.AdamW(model.parameters(), **options)
    output = model(distribute_tensor(torch.rand(2, 8, 16), mesh, [Shard(1)]))
    local = output.to_local() if isinstance(output, DTensor) else output
    local.sum().backward()
    with record() as r:
        adamw.step()
    assert by_phase(r) == {("optimizer", AR): count}


@pytest.mark.parametrize(
    ("style", "forward", "backward"),
    [
        (lambda: ColwiseParallel(), {}, {AR: 1}),
        (lambda: ColwiseParallel(input_layouts=Shard(0)), {AG: 1}, {RS: 1}),
        (lambda: ColwiseParallel(output_layouts=Replicate()), {AG: 1}, {AR: 1}),
        (lambda: RowwiseParallel(), {AR: 1}, {}),
        (lambda: RowwiseParallel(output_layouts=Shard(0)), {RS: 1}, {AG: 1}),
        (lambda: RowwiseParallel(input_layouts=Replicate()), {AR: 1}, {AG: 1}),
    ],
)
def test_parallel_styles(
    fake_world: World, style: Callable[[], ColwiseParallel], forward: dict[str, int], backward: dict[str, int]
) -> None:
    mesh = fake_world(4)
    model = parallelize_module(nn.Sequential(nn.Linear(16, 16)), mesh, {"0": style()})
    rows = 16
    columns = 4 if isinstance(style(), RowwiseParallel) and style().input_layouts == (Shard(-1),) else 16
    with record() as r:
        output = model(torch.rand(rows, columns, requires_grad=True))
        output.sum().backward()
    expected = {("forward", kind, "0"): count for kind, count in forward.items()}
    expected |= {("backward", kind, "0"): count for kind, count in backward.items()}
    assert by_module(r) == expected


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (Shard(0), Replicate(), {AG: 1}),
        (Shard(1), Replicate(), {AG: 1}),
        (Partial(), Replicate(), {AR: 1}),
        (Partial(), Shard(0), {RS: 1}),
        (Replicate(), Shard(0), {}),
        (Shard(0), Shard(1), {AG: 1}),  # an all_to_all where the mesh is on an accelerator
    ],
)
def test_redistribute(fake_world: World, source: Placement, target: Placement, expected: dict[str, int]) -> None:
    mesh = fake_world(4)
    tensor = DTensor.from_local(torch.rand(8, 8), mesh, [source], run_check=False)
    with record() as r:
        tensor.redistribute(mesh, [target])
    assert r.counts() == expected
    assert [(call.cause.src, call.cause.dst, call.cause.implicit) for call in r.calls() if call.cause] == [
        (placements_text([source]), placements_text([target]), False)
    ] * len(r.calls())


def test_matmul(fake_world: World) -> None:
    mesh = fake_world(4)
    left = DTensor.from_local(torch.rand(2, 8), mesh, [Shard(0)], run_check=False)
    weight = DTensor.from_local(torch.rand(2, 8, requires_grad=True), mesh, [Shard(0)], run_check=False)
    with record() as r:
        total: Any = torch.mm(left, weight).sum()
        total.backward()
    assert by_phase(r) == {("forward", AG): 1, ("backward", RS): 1}
    gather, scatter = r.calls()
    assert gather.cause == Cause("S(0)", "R", implicit=True, op="aten.mm.default")
    assert scatter.cause == Cause("P(sum)", "S(0)", implicit=False, op="")


@pytest.mark.parametrize(
    ("shape", "names", "count"), [((4,), ("dp",), 1), ((2, 2), ("replicate", "shard"), 1), ((2, 2), ("dp", "tp"), 2)]
)
def test_clipping_is_its_own_phase(
    fake_world: World, shape: tuple[int, ...], names: tuple[str, ...], count: int
) -> None:
    mesh = fake_world(*shape, names=names)
    model = MLPModule("cpu")
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=mesh)
    model(torch.rand(8, 10)).sum().backward()
    with record() as r:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert by_phase(r) == {("clip", AR): count}


def test_coalesced_calls_are_one_call_of_four_tensors(fake_world: World) -> None:
    fake_world(2)
    import torch.distributed as dist

    tensors = [torch.ones(2) for _ in range(4)]
    with record() as r, dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert r.counts() == {AR: 1}
    (call,) = r.calls()
    assert (call.raw_op, call.inputs, call.bytes_in) == ("c10d::allreduce_coalesced_", ((2,),) * 4, 32)


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLPModule("cpu") for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(("output", "expected"), [(Shard(1), {AG: 7, RS: 8}), (Replicate(), {AG: 7, RS: 4, AR: 4})])
def test_one_changed_layout_keeps_the_total(fake_world: World, output: Placement, expected: dict[str, int]) -> None:
    mesh = fake_world(2)
    model = Stack(4)
    for layer in model.layers:
        plan = {
            "net1": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "net2": RowwiseParallel(output_layouts=output, use_local_output=False),
        }
        parallelize_module(layer, mesh, plan)
    batch = DTensor.from_local(torch.rand(4, 4, 10, requires_grad=True), mesh, [Shard(1)], run_check=False)
    with record() as r:
        model(batch).sum().backward()
    assert r.counts() == expected


def test_preparing_the_input_three_times_gathers_three_times(fake_world: World) -> None:
    mesh = fake_world(4)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(16, 16)
            self.k = nn.Linear(16, 16)
            self.v = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = self.q(x) + self.k(x) + self.v(x)
            return total

    def count(shared: bool) -> dict[str, int]:
        model = nn.Sequential(Attention())
        layouts = None if shared else Shard(1)
        plan: dict[str, ParallelStyle] = {f"0.{name}": ColwiseParallel(input_layouts=layouts) for name in "qkv"}
        if shared:
            plan["0"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        parallelize_module(model, mesh, plan)
        with record() as r:
            model(torch.rand(2, 4, 16, requires_grad=True)).sum().backward()
        return r.counts()

    before, after = count(shared=True), count(shared=False)
    assert after[AG] - before[AG] == 2
    assert after[RS] - before[RS] == 2


def test_mlp_sequence_parallel_by_module(fake_world: World) -> None:
    mesh = fake_world(4)
    plan = {"net1": ColwiseParallel(input_layouts=Shard(0)), "net2": RowwiseParallel(output_layouts=Shard(0))}
    model = parallelize_module(MLPModule("cpu"), mesh, plan)
    with record() as r:
        model(torch.rand(2, 10, requires_grad=True)).sum().backward()
    assert by_module(r) == {
        ("forward", AG, "net1"): 1,
        ("forward", RS, "net2"): 1,
        ("backward", AG, "net2"): 1,
        ("backward", RS, "net1"): 1,
    }


def test_a_replicated_output_adds_one_gather(fake_world: World) -> None:
    mesh = fake_world(4)

    def count(style: ColwiseParallel) -> dict[tuple[str, str, str], int]:
        model = parallelize_module(nn.Sequential(nn.Linear(16, 16)), mesh, {"0": style})
        with record() as r:
            model(torch.rand(16, 16, requires_grad=True)).sum().backward()
        return by_module(r)

    before, after = count(ColwiseParallel()), count(ColwiseParallel(output_layouts=Replicate()))
    assert after == before | {("forward", AG, "0"): 1}


def test_resharding_after_forward_adds_three_gathers(fake_world: World) -> None:
    mesh = fake_world(2)

    def count(reshard: bool) -> dict[tuple[str, str, str], int]:
        model = Transformer(ModelArgs(dropout_p=0.0))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        with record() as r:
            model(torch.randint(0, 8, (8, 8))).sum().backward()
        return by_module(r)

    groups = ("(root)", "layers.0", "layers.1")
    before, after = count(reshard=False), count(reshard=True)
    assert after == before | {("backward", AG, group): 1 for group in groups}
    assert before == {
        (phase, kind, group): 1 for phase, kind in (("forward", AG), ("backward", RS)) for group in groups
    }


def test_foreach_adamw_reduces_four_times_more_than_fused(fake_world: World) -> None:
    mesh = fake_world(4)

    def count(**options: Any) -> dict[tuple[str, str], int]:
        model = parallelize_module(nn.Sequential(nn.LayerNorm(16)), mesh, {"0": SequenceParallel()})
        adamw = torch.optim.AdamW(model.parameters(), **options)
        output = model(distribute_tensor(torch.rand(2, 8, 16), mesh, [Shard(1)]))
        (output.to_local() if isinstance(output, DTensor) else output).sum().backward()
        with record() as r:
            adamw.step()
        return by_phase(r)

    assert (count(fused=True), count(foreach=True)) == ({("optimizer", AR): 2}, {("optimizer", AR): 6})
