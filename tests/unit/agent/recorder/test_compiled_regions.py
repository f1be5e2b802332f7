"""Module and line of collectives inside compiled regions, for each way to compile and each kind of backend."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule

from commwatch.agent import record
from commwatch.agent.recorder import regions, torch_private
from commwatch.agent.recorder.codes import of_user

dist: Any = torch.distributed  # its groups have no stubs
World = Callable[..., DeviceMesh]
AG, RS, AR = "all_gather", "reduce_scatter", "all_reduce"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = functional.all_gather_tensor_autograd(self.linear(x), 0, [0, 1])
        return y


class Model(nn.Module):
    """Two layers on one line, which a backward cannot tell apart by its stack, and one on another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.last = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.last(x)
        return y


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(backend: str) -> Any:
    return torch.compile(Model(), backend=backend)


def each_layer(backend: str) -> Any:
    model = Model()
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend=backend)  # type: ignore[assignment]
    return model


def each_layer_in_place(backend: str) -> Any:
    model = Model()
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def a_function(backend: str) -> Any:
    model = Model()
    return torch.compile(lambda x: model(x) * 2, backend=backend)


def found_in(model: Any, *shape: int, times: int = 2) -> tuple[Counter[tuple[str, str, str]], record]:
    with record() as recorded:
        for _ in range(times):
            model(torch.rand(*shape, requires_grad=True)).sum().backward()
    return Counter((call.phase, call.kind, call.module) for call in recorded.calls()), recorded


FORWARD = {("forward", AG, "layers.0"): 2, ("forward", AG, "layers.1"): 2, ("forward", AG, "last"): 2}
BY_LAYER = {("backward", RS, "last"): 2, ("backward", RS, "layers.0"): 2, ("backward", RS, "layers.1"): 2}
FOLDED = {("backward", RS, "last"): 2, ("backward", RS, "layers.*"): 4}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("make", "backward"),
    [(whole, FOLDED), (each_layer, BY_LAYER), (each_layer_in_place, BY_LAYER), (a_function, FOLDED)],
)
def test_modules_and_lines(
    fake_world: World, make: Callable[[str], Any], backward: dict[tuple[str, str, str], int], backend: str
) -> None:
    fake_world(2)
    found, recorded = found_in(make(backend), 4, 4)
    assert found == FORWARD | backward
    lines = {(line.function, call.phase) for call in recorded.calls() if call.phase == "forward" for line in call.lines}
    assert lines == {("forward", "forward")}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_tensor_parallel_styles_in_a_region(fake_world: World, backend: str) -> None:
    mesh = fake_world(2)
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    model = torch.compile(parallelize_module(MLPModule("cpu"), mesh, plan), backend=backend)
    found, recorded = found_in(model, 8, 10)
    assert found == {("forward", AR, "net2"): 2, ("backward", AR, "net1"): 2}
    # The gradient's placements are nowhere in what the compiler keeps.
    causes = {(call.phase, str(call.cause)) for call in recorded.calls()}
    assert causes == {("forward", "explicit redistribute P(sum) -> R"), ("backward", "None")}


def test_a_region_without_a_graph_in_reach_stays_without_a_module(fake_world: World, monkeypatch: Any) -> None:
    fake_world(2)
    monkeypatch.setattr(torch_private, "traced_graph", lambda compiled: None)
    found, _ = found_in(whole("inductor"), 4, 4)
    assert found == {("forward", AG, ""): 6, ("backward", RS, ""): 6}


class Broken(nn.Module):
    """Its forward is two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * 2
        torch._dynamo.graph_break()
        return y + 1


def scaled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 1.5


def hooked(mesh: DeviceMesh, way: str) -> Any:
    """A model whose modules have output hooks of their own."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), Broken(), nn.Linear(8, 8))
    for module in (model, model[0], model[1], model[1].linear):
        module.register_forward_hook(scaled)
    if way == "fully_shard":
        for module in model:
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if way == "in place":
        model[0].compile(backend="aot_eager")
        model[1].compile(backend="aot_eager")
        return model
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize("way", ["whole", "in place", "fully_shard"])
def test_compilation_is_the_same_with_and_without_a_recorder(fake_world: World, way: str) -> None:
    mesh = fake_world(2)
    counters = torch._dynamo.utils.counters
    seen = []
    for recording in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = hooked(mesh, way)
        hooks = [list(module._forward_hooks) for module in model.modules()]
        with record() if recording else contextlib.nullcontext():
            for _ in range(3):
                output = model(torch.ones(4, 8, requires_grad=True))
                output.sum().backward()
        assert [list(module._forward_hooks) for module in model.modules()] == hooks
        counted = [dict(counters[name]) for name in ("frames", "stats", "graph_break", "recompiles")]
        seen.append((counted, output.tolist()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self'].layers.0.lin", ("L", "self", "layers.0.lin")),
        ("L['self']._modules['layers']._modules['0']", ("L", "self", "layers.0")),
        ("L['self'].layers[1]", ("L", "self", "layers.1")),
        ("G['model']._orig_mod.net", ("G", "model", "net")),
        ("L['self']", ("L", "self", "")),
        ("something else", ("", "", "")),
    ],
)
def test_paths_of_modules(path: str, expected: tuple[str, str, str]) -> None:
    assert regions.relative(path) == expected


def test_stacks_are_compared_by_text_and_not_by_number() -> None:
    stack = (
        '  File "/home/a/m.py", line 3, in forward\n    y = f(x)\n        ^^^^\n  File "/home/a/n.py", line 9, in f\n'
    )
    assert regions.parse(stack) == [
        ("/home/a/m.py", 3, "forward", "    y = f(x)\n        ^^^^\n"),
        ("/home/a/n.py", 9, "f", ""),
    ]
    moved = stack.replace("line 3", "line 30")
    assert regions._key(regions.parse(stack)) == regions._key(regions.parse(moved))


def test_generated_code_is_not_the_user_s() -> None:
    assert of_user("/home/a/m.py")
    assert not of_user(torch.__file__)
    assert not of_user("/tmp/torchinductor_a/xy/z.py")
    assert not of_user("<eval_with_key>.3")


def test_a_stack_is_the_same_in_another_checkout() -> None:
    """inductor's cache hands out code, and its stacks, that it made for the same program at another place."""
    stack = '  File "{}/model.py", line {}, in forward\n    return all_reduce(x)\n'
    here, elsewhere = (regions._key(regions.parse(stack.format(*place))) for place in (("/a/b", 3), ("/c", 4)))
    assert here == elsewhere == (("model.py", "forward", "    return all_reduce(x)\n"),)
