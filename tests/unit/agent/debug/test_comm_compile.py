"""CommDebugMode and ``torch.compile``: the compiler does what it does without the mode, and its regions are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode

from commwatch.agent.debug import CommDebugMode
from tests.unit.agent.debug.comm_programs import Reduced, World, functional, own_module_counts, world

pytestmark = pytest.mark.filterwarnings("ignore")

REDUCE = functional.all_reduce
Region = Callable[[], nn.Module]


class Layers(nn.Module):
    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.broken = Reduced(), Reduced(), broken

    def forward(self, value: torch.Tensor) -> Any:
        value = self.first(value)
        if self.broken:
            torch._dynamo.graph_break()
        return funcol.all_reduce(self.second(value), "sum", world())


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.after = inner, Reduced()

    def forward(self, value: torch.Tensor) -> Any:
        return self.after(self.inner(value))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(backend: str) -> nn.Module:
    return torch.compile(Layers(), backend=backend)  # type: ignore[return-value]  # called like a module


def with_a_break(backend: str) -> nn.Module:
    return torch.compile(Layers(broken=True), backend=backend)  # type: ignore[return-value]  # called like a module


def part(backend: str) -> nn.Module:
    return Around(torch.compile(Layers(), backend=backend))  # type: ignore[arg-type]  # called like a module


def in_place(backend: str) -> nn.Module:
    model = Around(Layers())
    model.inner.compile(backend=backend)
    return model


REGIONS = [whole, with_a_break, part, in_place]


def train(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.ones(3, 4, requires_grad=True)).sum().backward()


def compilations(make: Any, backend: str, mode: AbstractContextManager[Any]) -> dict[str, dict[str, int]]:
    torch._dynamo.reset()
    counters.clear()
    model = make(backend)
    with mode:
        train(model)
    return {name: dict(counters[name]) for name in ("frames", "stats", "graph_break")}


@pytest.mark.parametrize("make", REGIONS, ids=lambda make: make.__name__)
def test_the_compiler_does_the_same_with_and_without(fake_world: World, make: Any) -> None:
    fake_world(4)
    without = compilations(make, "aot_eager", nullcontext())
    assert without["frames"]["ok"] >= 1
    assert compilations(make, "aot_eager", CommDebugMode()) == without


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_collectives_of_a_region_are_counted(fake_world: World, backend: str) -> None:
    fake_world(4)
    model, mode = whole(backend), CommDebugMode()
    with mode:
        train(model)
    assert mode.get_comm_counts() == {REDUCE: 12}
    assert own_module_counts(mode) == {
        ("OptimizedModule._orig_mod", "forward"): {REDUCE: 6},
        ("OptimizedModule._orig_mod", "backward"): {REDUCE: 6},
    }


def test_entering_after_compilation_compiles_nothing_anew(fake_world: World) -> None:
    fake_world(4)
    torch._dynamo.reset()
    counters.clear()
    model = whole("aot_eager")
    train(model)
    before = dict(counters["frames"]), dict(counters["stats"])
    for _ in range(3):
        with CommDebugMode() as mode:
            train(model)
        assert mode.get_total_counts() == 12
        train(model)
    assert (dict(counters["frames"]), dict(counters["stats"])) == before


def test_a_region_inside_a_model_belongs_to_its_module(fake_world: World) -> None:
    fake_world(4)
    model = in_place("aot_eager")
    with CommDebugMode() as mode:
        train(model)
    assert own_module_counts(mode) == {
        ("Around.inner", "forward"): {REDUCE: 6},
        ("Around.inner", "backward"): {REDUCE: 6},
        ("Around.after", "forward"): {REDUCE: 2},
        ("Around.after", "backward"): {REDUCE: 2},
    }


def test_torchs_mode_keeps_the_compiler_from_the_region(fake_world: World) -> None:
    fake_world(4)
    torch._dynamo.reset()
    counters.clear()
    model = whole("aot_eager")
    with TorchCommDebugMode():
        model(torch.ones(3, 4))
    assert dict(counters["frames"]) == {}
