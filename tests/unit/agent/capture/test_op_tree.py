"""The tree of a capture: valid whatever the program does, with each op below what it runs in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from commwatch.agent.capture.plan import Plan
from commwatch.agent.recorder.recorder import Recorder
from commwatch.v1 import records_pb2
from tests.unit.agent.capture.test_capturer import MLP, kind_of
from tests.unit.agent.recorder.memory_sink import MemorySink

World = Callable[..., DeviceMesh]
Node = tuple[int, str, str]
Statement = tuple[str, tuple[Any, ...]]


def captured(program: Callable[[], Any]) -> records_pb2.Capture:
    sink = MemorySink()
    errors: list[BaseException] = []
    recorder = Recorder(sink, Path(__file__).parent, errors.append, Plan(((1, 1),)))
    recorder.start()
    try:
        program()
    finally:
        recorder.step()
        recorder.stop()
    assert errors == []
    (capture,) = sink.captures
    assert capture.reason == ""
    return capture


def label(call: records_pb2.CapturedCall) -> str:
    """The name; of an addition the number added, which tells one from another."""
    if call.name in ("aten::add.Tensor", "aten::add_.Tensor") and len(call.arguments) > 1:
        return f"add {call.arguments[1].text}"
    return call.name


def tree(capture: records_pb2.Capture) -> list[Node]:
    calls = capture.calls
    return [(record.depth, kind_of(calls[record.call]), label(calls[record.call])) for record in capture.records]


def assert_valid(nodes: list[Node]) -> None:
    before = -1
    for index, (depth, kind, name) in enumerate(nodes):
        assert depth <= before + 1, f"record {index}: {kind} {name} at depth {depth} behind one at {before}"
        before = depth


def path(nodes: list[Node], index: int) -> list[tuple[str, str]]:
    """(kind, name) of what a record stands below, outermost first."""
    found, depth = [], nodes[index][0]
    for above in reversed(nodes[:index]):
        if above[0] < depth:
            found.append(above[1:])
            depth = above[0]
    return found[::-1]


class Failed(Exception):  # noqa: N818  no error of the test's
    """What a program raises and catches."""


class Block(nn.Module):
    """Runs statements; each addition notes the modules and ranges it runs in, the first time."""

    def __init__(self, statements: tuple[Statement, ...], world: Program, *, fails: bool = False) -> None:
        super().__init__()
        self.world = world
        self.fails = fails
        self.scale = nn.Parameter(torch.ones(1))
        self.statements = statements
        self.blocks = nn.ModuleList(
            [
                Block(inner, world, fails=kind == "raises") if kind != "op" else nn.Identity()
                for kind, inner in statements
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block, (kind, _inner) in zip(self.blocks, self.statements, strict=True):
            x = self.world.statement(kind, block, x)
        if self.fails:
            raise Failed
        return x


class Program:
    """A random program. ``expected``: by the number an op adds, what it runs in."""

    def __init__(self, statements: tuple[Statement, ...], mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.open: list[tuple[str, str]] = []
        self.expected: dict[str, list[tuple[str, str]]] = {}
        self.forward = True
        self.count = 0
        self.model = Block(statements, self)

    def statement(self, kind: str, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if kind == "op":
            return self.add(x)
        if kind == "range":
            return self.within(("record_function", f"range {len(self.open)}"), lambda: self.in_range(block, x))
        if kind == "dtensor":
            self.sharded()
        if kind == "raises":
            return self.caught(block, x)
        if kind in ("checkpoint", "reentrant"):
            y: torch.Tensor = checkpoint(functools.partial(self.call, block), x, use_reentrant=kind == "reentrant")
            return y
        return self.call(block, x)

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        name = next(name for name, module in self.model.named_modules() if module is block)
        return self.within(("module", name), lambda: block(x))

    def in_range(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with record_function(self.open[-1][1]):
            return self.call(block, self.add(x))

    def caught(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(Failed):
            self.call(block, x)
        return self.add(x)

    def within(self, entry: tuple[str, str], work: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.open.append(entry)
        try:
            return work()
        finally:
            self.open.pop()

    def add(self, x: torch.Tensor) -> torch.Tensor:
        if not self.forward:
            return x + 0  # the same op for autograd: a recomputed forward must save the same tensors
        self.count += 1
        self.expected[f"add {self.count}"] = [("module", "(root)"), *self.open]
        return x + self.count

    def sharded(self) -> None:
        x = DTensor.from_local(torch.ones(1, 8), self.mesh, [Shard(0)], run_check=False)
        y = DTensor.from_local(torch.ones(2, 8), self.mesh, [Shard(0)], run_check=False)
        torch.mm(x, y)

    def run(self) -> None:
        loss = self.model(torch.ones(4, requires_grad=True)).sum()
        self.forward = False
        loss.backward()


KINDS = ("module", "range", "dtensor", "raises", "checkpoint", "reentrant")
STATEMENTS = st.recursive(
    st.just((("op", ()),)),
    lambda inner: st.lists(st.tuples(st.sampled_from(KINDS), inner), min_size=1, max_size=3).map(
        lambda statements: (*statements, ("op", ()))
    ),
    max_leaves=6,
)


@pytest.fixture
def mesh(fake_world: World) -> DeviceMesh:
    return fake_world(4, names=("tp",))


@given(statements=STATEMENTS)
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],  # one mesh serves them all
)
def test_the_tree_is_valid_and_each_op_is_below_what_it_runs_in(statements: tuple[Statement, ...], mesh: Any) -> None:
    program = Program(statements, mesh)
    nodes = tree(captured(program.run))
    assert_valid(nodes)
    found = {}
    for index, (_, kind, name) in enumerate(nodes):
        if kind == "op" and name.startswith("add ") and name not in found:
            found[name] = path(nodes, index)
        if kind == "op" and name == "aten::mm":
            assert path(nodes, index)[-1] == ("dtensor_op", "aten::mm")
        if kind == "op" and name == "_c10d_functional::all_gather_into_tensor":
            assert path(nodes, index)[-3:] == [
                ("dtensor_op", "aten::mm"),
                ("redistribute", "redistribute_input"),
                ("redistribute", "redistribute_input"),
            ]
    assert {name: found[name] for name in program.expected} == program.expected


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.first, x, use_reentrant=False)
        z: torch.Tensor = checkpoint(self.second, y, use_reentrant=True)
        return z


def test_recomputed_forwards_in_backward_show_their_modules(fake_world: World) -> None:
    """HSDP around tensor-parallel blocks, one recomputed by either kind of checkpointing."""
    mesh = fake_world(2, 2, 2, names=("replicate", "shard", "tp"))
    model = Recomputed()
    for block in (model.first, model.second):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    capture = captured(lambda: model(torch.ones(4, 8, requires_grad=True)).sum().backward())
    nodes = tree(capture)
    assert_valid(nodes)
    modules = [node for node in nodes if node[1] == "module"]
    began = next(index for index, node in enumerate(nodes) if node[2] == "(root) (backward)")
    forward = [(0, "(root)"), (1, "first"), (2, "first.up"), (2, "first.down")]
    forward += [(1, "second"), (2, "second.up"), (2, "second.down")]
    assert [(depth, name) for depth, _, name in modules[:7]] == forward
    recomputed = [(depth, name) for depth, _, name in modules[7:] if not name.endswith("(backward)")]
    assert recomputed == [
        (1, "second"),
        (2, "second.up"),
        (2, "second.down"),
        (1, "first"),
        (2, "first.up"),
        (2, "first.down"),
    ]
    backward = {name for _, _, name in modules[7:] if name.endswith("(backward)")}
    assert backward >= {f"{block}.{part} (backward)" for block in ("first", "second") for part in ("up", "down")}
    for index, (record, (_, kind, name)) in enumerate(zip(capture.records, nodes, strict=True)):
        if kind == "dtensor_op" and name == "aten::addmm":
            assert path(nodes, index)[-1][1].split(".")[-1] in {"up", "down"}
            assert capture.lines[record.line - 1].function == "forward"
        if name == "_c10d_functional::all_reduce" and index < began:
            assert path(nodes, index)[-2:] == [("module", "second.down"), ("redistribute", "redistribute_input")] or (
                path(nodes, index)[-2:] == [("module", "first.down"), ("redistribute", "redistribute_input")]
            )
    issued = [
        (call.kind, call.phase, call.module, path(nodes, index)[0][1])
        for index, record in enumerate(capture.records)
        for call in capture.calls[record.call].collectives
        if index >= began and call.group.name == "tp"
    ]
    assert issued == [
        ("all_reduce", "recompute", "second.down", "(root) (backward)"),
        ("all_reduce", "backward", "second.up", "second.up (backward)"),
        ("all_reduce", "backward", "first.up", "first.up (backward)"),
    ]


def test_an_op_on_dtensors_without_a_local_one_has_no_children(fake_world: World) -> None:
    mesh = fake_world(4, names=("tp",))

    def program() -> None:
        x = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
        local = torch.ones(2)
        torch.ops.aten.is_same_size(x, x)
        local.sin()
        local.cos()

    nodes = tree(captured(program))
    assert [node for node in nodes if node[2] != "aten::ones"][-3:] == [
        (0, "dtensor_op", "aten::is_same_size"),
        (0, "op", "aten::sin"),
        (0, "op", "aten::cos"),
    ]
