"""Phase and module of every way to communicate, on the fake process group."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule
from torch.utils.checkpoint import checkpoint

from commwatch.agent import record

dist: Any = torch.distributed  # its functions have no stubs
World = Callable[..., DeviceMesh]
Rows = dict[tuple[str, str, str], int]
AG, RS, AR = "all_gather", "reduce_scatter", "all_reduce"


def rows(recorded: record) -> Rows:
    return dict(Counter((call.phase, call.kind, call.module) for call in recorded.calls()))


def train(model: Any, *shape: int) -> Rows:
    with record() as recorded:
        model(torch.rand(*shape, requires_grad=True)).sum().backward()
    return rows(recorded)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        # R -> S in the module's own output hook communicates nothing in forward; its gradient is gathered.
        (
            PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
            {("backward", AG, "inner"): 1},
        ),
        (
            PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
            {("forward", AG, "inner"): 1},
        ),
        (
            PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=True),
            {("forward", AG, "inner"): 1},
        ),
        (
            PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),), use_local_output=True),
            {("backward", AG, "inner"): 1},
        ),
        (
            PrepareModuleInputOutput(
                input_layouts=(Shard(0),),
                desired_input_layouts=(Replicate(),),
                use_local_input=True,
                output_layouts=Replicate(),
                desired_output_layouts=Shard(0),
            ),
            {("forward", AG, "inner"): 1, ("backward", AG, "inner"): 1},
        ),
    ],
)
def test_what_a_style_does_in_a_module_s_own_hooks_is_that_module_s(
    fake_world: World, style: Any, expected: Rows
) -> None:
    mesh = fake_world(2)
    model = Outer(nn.Identity())
    parallelize_module(model.inner, mesh, style)
    assert train(model, 4, 8) == expected


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.after = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.after(self.inner(x * 2) * 3)
        return y


class ReducedInBackward(torch.autograd.Function):
    """Megatron's f: nothing in forward, an all_reduce of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def reduce_gradient(module: nn.Module, args: Any, output: torch.Tensor) -> Any:
    return ReducedInBackward.apply(output)  # type: ignore[no-untyped-call]


def test_a_user_s_own_hook_that_communicates_in_backward_alone(fake_world: World) -> None:
    fake_world(2)
    model = Outer(nn.Linear(8, 8))
    handle = model.inner.register_forward_hook(reduce_gradient)
    assert train(model, 4, 8) == {("backward", AR, "inner"): 1}
    assert list(model.inner._forward_hooks) == [handle.id]


def test_a_hook_that_raises_leaves_no_hook_of_the_recorder(fake_world: World) -> None:
    fake_world(2)
    model = Outer(nn.Linear(8, 8))

    def fail(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    handle = model.inner.register_forward_hook(fail)
    with record() as recorded:
        with pytest.raises(ArithmeticError):
            model(torch.rand(4, 8))
        handle.remove()
        model.inner.register_forward_hook(reduce_gradient)
        model(torch.rand(4, 8, requires_grad=True)).sum().backward()
    assert rows(recorded) == {("backward", AR, "inner"): 1}
    assert len(model.inner._forward_hooks) == 1


def test_sequence_parallel_norm(fake_world: World) -> None:
    mesh = fake_world(2)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    plan: dict[str, Any] = {
        "0": SequenceParallel(use_local_output=False),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)
    assert train(model, 2, 4, 8) == {
        ("forward", AG, "1"): 1,
        ("forward", RS, "2"): 1,
        ("backward", AG, "2"): 1,
        ("backward", RS, "1"): 1,
    }


def test_loss_parallel_belongs_to_no_module_and_its_model_does(fake_world: World) -> None:
    mesh = fake_world(2)
    model = nn.Sequential(nn.Linear(8, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False)})
    with record() as recorded, loss_parallel():
        logits = model(torch.rand(4, 8, requires_grad=True))
        nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.int64)).backward()
    found = rows(recorded)
    assert found.pop(("backward", AR, "0")) == 1
    assert found == {("forward", AR, ""): 3}


class Reducing(nn.Module):
    """Communicates by one of torch's differentiable ways."""

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.reduce = reduce
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(self.linear(x))


@pytest.mark.parametrize(
    ("reduce", "forward", "backward"),
    [
        (lambda x: functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD), AG, RS),
        (lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD), RS, AG),
        (lambda x: functional.all_to_all_single_autograd(x, None, None, dist.group.WORLD), "all_to_all", "all_to_all"),
        (lambda x: differentiable.all_reduce(x), AR, AR),
        (lambda x: torch.cat(differentiable.all_gather(x)), AG, "all_to_all"),
    ],
)
def test_differentiable_collectives(fake_world: World, reduce: Any, forward: str, backward: str) -> None:
    fake_world(2)
    model = nn.Sequential(Reducing(reduce), nn.ReLU(), nn.Linear(8, 8))
    found = train(model, 4, 8)
    assert {key: count for key, count in found.items() if key[0] == "forward"} == {("forward", forward, "0"): 1}
    assert {key[2] for key in found} == {"0"}
    assert sum(count for key, count in found.items() if key[0] == "backward") >= 1
    if backward != "all_to_all" or forward == "all_to_all":
        assert ("backward", backward, "0") in found


def test_fsdp1_gathers_and_scatters_for_the_wrapped_module(fake_world: World) -> None:
    fake_world(2)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0] = FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))
    model[1] = FullyShardedDataParallel(model[1], device_id=torch.device("cpu"))
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    train(model, 4, 8)
    found = train(model, 4, 8)
    assert found == {
        ("forward", AG, "0"): 1,
        ("forward", AG, "1"): 1,
        ("backward", AG, "0"): 1,
        ("backward", AG, "1"): 1,
        ("backward", RS, "0"): 1,
        ("backward", RS, "1"): 1,
    }
    with record() as recorded:
        model.clip_grad_norm_(1.0)
    assert rows(recorded) == {("clip", AR, ""): 1}


def test_hsdp_reduces_over_both_dimensions_for_each_group(fake_world: World) -> None:
    mesh = fake_world(2, 2, names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with record() as recorded:
        model(torch.rand(4, 8)).sum().backward()
    found = Counter((call.phase, call.kind, call.module, call.group.name) for call in recorded.calls())
    assert found == {
        ("forward", AG, "0", "shard"): 1,
        ("forward", AG, "1", "shard"): 1,
        ("backward", AG, "0", "shard"): 1,
        ("backward", AG, "1", "shard"): 1,
        ("backward", RS, "0", "shard"): 1,
        ("backward", RS, "1", "shard"): 1,
        ("backward", AR, "0", "replicate"): 1,
        ("backward", AR, "1", "replicate"): 1,
    }


def test_a_hook_on_a_parameter_is_its_module_s(fake_world: World) -> None:
    fake_world(2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def reduce(parameter: torch.Tensor) -> None:
        dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    assert train(model, 4, 8) == {("backward", AR, "0"): 2, ("backward", AR, "1"): 2}


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(MLPModule("cpu"), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})


class Checkpointed(nn.Module):
    """Checkpoints its blocks, or parts of its own forward."""

    def __init__(self, blocks: list[nn.Module], reentrant: bool, part: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.reentrant, self.part = reentrant, part

    def twice(self, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        y: torch.Tensor = block(x)
        return ReducedInBackward.apply(y * 2)  # type: ignore[no-untyped-call,no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.part:
                x = checkpoint(self.twice, x, block, use_reentrant=self.reentrant)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("part", [True, False])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_checkpointing_names_the_module_also_when_backward_runs_on_another_thread(
    fake_world: World, reentrant: bool, part: bool, elsewhere: bool
) -> None:
    mesh = fake_world(2)
    model = Checkpointed([tensor_parallel(mesh), tensor_parallel(mesh)], reentrant, part)
    with record() as recorded:
        loss = model(torch.rand(4, 10, requires_grad=True)).sum()
        if elsewhere:
            worker = threading.Thread(target=loss.backward)
            worker.start()
            worker.join()
        else:
            loss.backward()
    expected: Rows = {("forward", AR, f"blocks.{index}.net2"): 1 for index in range(2)}
    expected |= {("backward", AR, f"blocks.{index}.net1"): 1 for index in range(2)}
    # Without reentrance recomputation stops as soon as every saved tensor is there: before a block's last all_reduce.
    expected |= {("recompute", AR, f"blocks.{index}.net2"): 1 for index in range(2) if reentrant or part}
    if part:
        expected[("backward", AR, "(root)")] = 2
    found = rows(recorded)
    if part and not reentrant:
        found = {key: count for key, count in found.items() if key[0] != "recompute"}
        expected = {key: count for key, count in expected.items() if key[0] != "recompute"}
    assert found == expected


def test_two_threads_that_train_two_models_keep_their_modules(fake_world: World) -> None:
    mesh = fake_world(2)
    first, second = tensor_parallel(mesh), tensor_parallel(mesh)
    turn = threading.Barrier(2, timeout=30)

    def work(model: nn.Module) -> None:
        for _ in range(3):
            turn.wait()
            model(torch.rand(4, 10, requires_grad=True)).sum().backward()

    with record() as recorded:
        threads = [threading.Thread(target=work, args=(model,)) for model in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    known = {"net1", "net2", "MLPModule.net1", "MLPModule.net2"}
    found = rows(recorded)
    assert sum(found.values()) == 12
    # A number may be of either thread's node: then the module is left out, and never the wrong one given.
    for phase, _, module in found:
        assert module in (known if phase == "forward" else {name for name in known if name.endswith("net1")} | {""})
