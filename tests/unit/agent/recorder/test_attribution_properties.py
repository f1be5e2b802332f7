"""Over random module trees: the tree of counts adds up, and agrees with an independent count of the program's own."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from commwatch.agent import record

dist: Any = torch.distributed  # its ops have no stubs
Issued = Counter[tuple[str, str, str]]

ACTIONS = ("none", "plain", "functional", "autograd", "redistribute", "caught")


class Ledger:
    """What the program itself knows it issued: (module, phase, kind)."""

    def __init__(self) -> None:
        self.issued: Issued = Counter()
        self.recomputing = 0

    def add(self, module: str, kind: str, phase: str = "") -> None:
        where = "eval" if not phase and not self.grad else phase or ("recompute" if self.in_backward else "forward")
        self.issued[module, where, kind] += 1

    @property
    def in_backward(self) -> bool:
        return torch._C._current_autograd_node() is not None

    grad = True


LEDGER = Ledger()
MESH: list[DeviceMesh] = []


class CountedBackward(torch.autograd.Function):
    """Says when the gradient of the line it stands on passes: the collective's own backward is issued there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: str, kind: str) -> torch.Tensor:
        ctx.module, ctx.kind = module, kind
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        LEDGER.add(ctx.module, ctx.kind, "backward")
        return grad, None, None


class Node(nn.Module):
    def __init__(self, name: str, action: str, children: list[Node], twice: bool, checkpointed: str) -> None:
        super().__init__()
        self.name, self.action, self.twice, self.checkpointed = name, action, twice, checkpointed
        self.parts = nn.ModuleList(children)
        self.raising = Raising(name)
        self.scale = nn.Parameter(torch.ones(4))

    def act(self, x: torch.Tensor) -> torch.Tensor:
        if self.action == "plain":
            LEDGER.add(self.name, "all_reduce")
            dist.all_reduce(x.detach().clone())
        elif self.action == "functional":
            LEDGER.add(self.name, "all_reduce")
            x = x + functional.all_reduce(x.detach(), "sum", MESH[0]).sum() * 0
        elif self.action == "autograd":
            LEDGER.add(self.name, "all_gather")
            gathered = functional.all_gather_tensor_autograd(x, 0, MESH[0])
            x = CountedBackward.apply(gathered, self.name, "reduce_scatter")[: x.shape[0]]  # type: ignore[no-untyped-call]
        elif self.action == "redistribute":
            LEDGER.add(self.name, "all_gather")
            sharded = DTensor.from_local(x, MESH[0], [Shard(0)], run_check=False)
            x = sharded.redistribute(MESH[0], [Replicate()]).to_local()[: x.shape[0]]
        elif self.action == "caught":
            with contextlib.suppress(ArithmeticError):
                self.raising(x)
        return x

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(x * self.scale)
        for part in self.parts:
            x = part(x)
            if self.twice:
                x = part(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpointed:
            return self.run(x)
        result: torch.Tensor = checkpoint(self.run, x, use_reentrant=self.checkpointed == "reentrant", early_stop=False)
        return result


class Raising(nn.Module):
    """Communicates and raises."""

    def __init__(self, parent: str) -> None:
        super().__init__()
        self.parent = parent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        prefix = "" if self.parent == "(root)" else f"{self.parent}."
        LEDGER.add(f"{prefix}raising", "all_reduce")
        dist.all_reduce(x.detach().clone())
        raise ArithmeticError("on purpose")


class CountingMode(TorchDispatchMode):
    """The independent count of every c10d and functional collective of the thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        quiet = ("wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group")
        if name.startswith(("c10d::", "_c10d_functional")) and not any(word in name for word in quiet):
            self.count += 1
        return func(*args, **(kwargs or {}))


@st.composite
def nodes(draw: st.DrawFn, name: str = "(root)", depth: int = 0) -> Node:
    count = draw(st.integers(0, 2)) if depth < 3 else 0
    prefix = "" if name == "(root)" else f"{name}."
    children = [draw(nodes(f"{prefix}parts.{index}", depth + 1)) for index in range(count)]
    action = draw(st.sampled_from(ACTIONS))
    checkpointed = draw(st.sampled_from(["", "", "reentrant", "plain"])) if depth == 1 else ""
    return Node(name, action, children, draw(st.booleans()), checkpointed)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    MESH.append(init_device_mesh("cpu", (2,)))
    yield
    dist.destroy_process_group()
    MESH.clear()


def run(root: Node, grad: bool) -> tuple[record, Issued]:
    LEDGER.issued, LEDGER.grad = Counter(), grad
    with record() as recorded, contextlib.nullcontext() if grad else torch.no_grad():
        output = root(torch.ones(4, 4, requires_grad=True))
        if grad:
            output.sum().backward()
    return recorded, LEDGER.issued


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(root=nodes(), grad=st.booleans())
def test_the_tree_adds_up_and_equals_what_the_program_issued(root: Node, grad: bool) -> None:
    recorded, issued = run(root, grad)
    tree = recorded.modules()
    for node in tree.walk():
        below: Counter[tuple[str, str]] = Counter()
        for child in node.children:
            below.update(child.total)
        assert node.total == node.own + below
    assert sum(tree.total.values()) == len(recorded.calls())
    found: Issued = Counter()
    for node in tree.walk():
        for (phase, kind), count in node.own.items():
            found[node.name, phase, kind] += count
    assert found == issued


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(root=nodes())
def test_the_total_equals_a_plain_dispatch_mode_s(root: Node) -> None:
    with CountingMode() as mode, torch.no_grad():
        root(torch.ones(4, 4))
    recorded, _ = run(root, grad=False)
    assert len(recorded.calls()) == mode.count
