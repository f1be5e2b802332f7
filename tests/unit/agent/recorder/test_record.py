"""``record`` beside everything a program may do: exceptions, threads, subclasses, compilation."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules import module as module_hooks
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule
from torch.utils.checkpoint import checkpoint

from commwatch.agent import record
from commwatch.agent.recorder import catalog, interpose, torch_private
from commwatch.agent.recorder.groups import Group
from commwatch.agent.recorder.modules import ModuleNames

World = Callable[..., DeviceMesh]


def tensor_parallel_mlp(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(MLPModule("cpu"), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})


def test_structured_calls(fake_world: World) -> None:
    mesh = fake_world(2, 4, names=("dp", "tp"))
    model = tensor_parallel_mlp(mesh["tp"])
    with record() as r:
        model(torch.rand(8, 10))
    (call,) = r.calls()
    assert (call.kind, call.raw_op, call.phase, call.module) == ("all_reduce", "c10d::allreduce_", "forward", "net2")
    assert call.group == Group("tp", 4, 1)
    assert (call.dtype, call.inputs, call.outputs) == ("float32", ((8, 10),), ((8, 10),))
    assert (call.bytes_in, call.bytes_out) == (320, 320)
    assert str(call.cause) == "explicit redistribute P(sum) -> R"
    assert [(line.function, line.file.rpartition("/")[2]) for line in call.lines] == [
        ("test_structured_calls", "test_record.py")
    ]


def test_the_table_holds_every_column(fake_world: World) -> None:
    fake_world(2)
    tensor = torch.ones(6, dtype=torch.bfloat16)
    with record() as r:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    header, row, total = str(r).splitlines()
    assert header.split() == ["count", "bytes", "phase", "kind", "group", "module", "dtype", "cause", "line"]
    assert row.split()[:4] == ["2", "24", "other", "all_reduce"]
    assert "dim0(size 2, stride 1)" in row
    assert total == "2 collectives"


def test_a_mesh_dimension_that_spans_the_world_gives_the_default_group_its_name(fake_world: World) -> None:
    fake_world(4, names=("dp",))
    with record() as r:
        dist.all_reduce(torch.ones(1))
    assert r.calls()[0].group == Group("dp", 4, 1)


def test_groups_without_a_mesh_are_known_by_description_size_and_stride(fake_world: World) -> None:
    fake_world(8, names=("world",))
    pairs = dist.new_group([0, 4], group_desc="pairs")
    plain = dist.new_group([0, 1, 2, 3])
    uneven = dist.new_group([0, 1, 5])
    with record() as r:
        for group in (pairs, plain, uneven):
            dist.all_reduce(torch.ones(1), group=group)
    assert [call.group for call in r.calls()] == [Group("pairs", 2, 4), Group("group", 4, 1), Group("group", 3, 0)]


def test_send_recv_and_barrier_are_seen(fake_world: World) -> None:
    fake_world(2)
    with record() as r:
        dist.send(torch.ones(3), 1)
        dist.recv(torch.ones(5), 1)
        dist.barrier()
    assert [(call.kind, call.bytes_in, call.bytes_out) for call in r.calls()] == [
        ("send", 12, 0),
        ("recv", 0, 20),
        ("barrier", 0, 0),
    ]


def test_a_module_called_twice_is_counted_twice(fake_world: World) -> None:
    mesh = fake_world(2)
    model = tensor_parallel_mlp(mesh)
    with record() as r:
        model(model(torch.rand(4, 10)))
    assert [(call.module, call.phase) for call in r.calls()] == [("net2", "forward")] * 2


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        raise ArithmeticError("on purpose")


class Catching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.failing = Failing()
        self.after = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            self.failing(x)
        except ArithmeticError:
            dist.all_reduce(x)
        return x


def test_an_exception_caught_in_forward_leaves_attribution_right(fake_world: World) -> None:
    fake_world(2)
    with record() as r:
        Catching()(torch.ones(2))
        dist.all_reduce(torch.ones(2))
    assert [(call.module, call.phase) for call in r.calls()] == [
        ("failing", "forward"),
        ("(root)", "forward"),
        ("", "other"),
    ]


def test_another_thread_is_seen(fake_world: World) -> None:
    fake_world(2)
    with record() as r:
        worker = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2)))
        worker.start()
        worker.join()
    assert r.counts() == {"all_reduce": 1}


class Foreign(torch.Tensor):
    """A tensor subclass that issues a collective inside its own dispatch."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
        dist.all_reduce(torch.ones(1))
        return result


def test_a_collective_inside_a_foreign_dispatch_is_seen_once(fake_world: World) -> None:
    fake_world(2)
    tensor = torch.Tensor._make_subclass(Foreign, torch.ones(2))
    with record() as r:
        torch.neg(tensor)
    assert r.counts() == {"all_reduce": 1}


def test_recomputation_is_its_own_phase(fake_world: World) -> None:
    mesh = fake_world(2)
    model = nn.Sequential(tensor_parallel_mlp(mesh), tensor_parallel_mlp(mesh))
    forward = [("forward", "0.net2"), ("forward", "1.net2")]
    backward = [("backward", "1.net1"), ("backward", "0.net1")]
    # Without reentrance recomputation stops as soon as every saved tensor is there: before the last all_reduce.
    for reentrant, recompute in ((True, ["0.net2", "1.net2"]), (False, ["0.net2"])):
        with record() as r:
            x = torch.rand(4, 10, requires_grad=True)
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        found = [(call.phase, call.module) for call in r.calls()]
        assert found == forward + [("recompute", name) for name in recompute] + backward


def test_without_gradients_the_phase_is_eval(fake_world: World) -> None:
    mesh = fake_world(2)
    model = tensor_parallel_mlp(mesh)
    with record() as r, torch.no_grad():
        model(torch.rand(4, 10))
    assert [(call.phase, call.module) for call in r.calls()] == [("eval", "net2")]


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reduced: torch.Tensor = functional.all_reduce(self.linear(x), "sum", [0, 1])
        return reduced


def test_a_compiled_region_is_counted_when_it_runs_and_not_when_it_is_compiled(fake_world: World) -> None:
    fake_world(2)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(Compiled(), backend="aot_eager", fullgraph=True)
    with record() as r:
        for _ in range(3):
            compiled(torch.rand(2, 4))
    assert r.counts() == {"all_reduce": 3}
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(counters["graph_break"].values()) == 0


def test_nothing_is_left_behind(fake_world: World) -> None:
    mesh = fake_world(2)
    model = tensor_parallel_mlp(mesh)
    before = (
        dict(module_hooks._global_forward_hooks),
        dict(module_hooks._global_forward_pre_hooks),
        DeviceMesh.__init__,
        {name: torch._C._dispatch_dump(name) for name, _ in catalog.all_ops()},
    )
    with contextlib.suppress(ArithmeticError), record():
        Failing()(model(torch.rand(4, 10)))
    after = (
        dict(module_hooks._global_forward_hooks),
        dict(module_hooks._global_forward_pre_hooks),
        DeviceMesh.__init__,
        {name: torch._C._dispatch_dump(name) for name, _ in catalog.all_ops()},
    )
    assert after == before
    assert not interpose.installed()


def test_no_tensor_and_no_module_is_kept_alive(fake_world: World) -> None:
    mesh = fake_world(2)
    model: Any = tensor_parallel_mlp(mesh)
    with record() as r:
        x = torch.rand(4, 10, requires_grad=True)
        y = model(x)
        y.sum().backward()
        references = [weakref.ref(x), weakref.ref(y), weakref.ref(model), weakref.ref(model.net1.weight)]
        del x, y, model
        gc.collect()
        assert [reference() for reference in references] == [None] * 4
    assert r.counts() == {"all_reduce": 2}


def test_nested_records_both_see(fake_world: World) -> None:
    fake_world(2)
    with record() as outer:
        dist.all_reduce(torch.ones(1))
        with record() as inner:
            dist.all_reduce(torch.ones(1))
    assert (outer.counts(), inner.counts()) == ({"all_reduce": 2}, {"all_reduce": 1})


def test_every_c10d_op_has_a_kind() -> None:
    unknown = [name for name, op in catalog.all_ops() if op.kind == "unknown"]
    assert unknown == []
    assert torch_private.missing() == []


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="torch has c10d::gather_into_tensor_ from 2.14 on")
def test_a_gather_into_one_tensor_is_a_gather_with_both_its_tensors(fake_world: World) -> None:
    fake_world(2)
    gather: Any = dist.gather_single  # type: ignore[attr-defined, unused-ignore]  # of later releases
    with record() as r, pytest.raises(RuntimeError, match="fake does not support gather_single"):
        gather(torch.ones(3), torch.empty(6), dst=0)
    (call,) = r.calls()
    assert (call.kind, call.raw_op, call.group.size) == ("gather", "c10d::gather_into_tensor_", 2)
    assert (call.inputs, call.outputs, call.bytes_in, call.bytes_out) == (((3,),), ((6,),), 12, 24)


def test_an_op_the_table_does_not_know_is_recorded_with_its_name(
    fake_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(2)
    monkeypatch.delitem(catalog.KINDS, "c10d::allreduce_")
    with record() as r:
        dist.all_reduce(torch.ones(2))
    assert [(call.kind, call.raw_op, call.bytes_in) for call in r.calls()] == [("unknown", "c10d::allreduce_", 8)]


def test_a_failing_recorder_leaves_the_collective_alone(fake_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_world(2)
    with record() as r:
        monkeypatch.setattr(r._observer, "observe", None)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
    assert (r.counts(), r.dropped) == ({}, 1)


class MakesModules(nn.Module):
    """Makes a module in every forward, as careless models do."""

    walks = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Reducing()(x)
        return made

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        type(self).walks += 1
        return super().named_modules(*args, **kwargs)


class Reducing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x


def test_modules_made_in_forward_do_not_make_the_model_be_walked_for_ever(fake_world: World) -> None:
    fake_world(2)
    model = nn.Sequential(MakesModules(), MakesModules())
    MakesModules.walks = 0
    with record() as r:
        for _ in range(100):
            model(torch.ones(2))
    assert {call.module for call in r.calls()} == {"0.Reducing", "1.Reducing"}
    assert MakesModules.walks == 2 * (1 + ModuleNames.LEARN_AGAIN)
    assert r._observer.names.inventory() == [("(root)", 1), ("*", 2)]


def test_a_module_added_to_a_known_model_gets_its_name(fake_world: World) -> None:
    fake_world(2)
    model = nn.Sequential(nn.Identity())
    with record() as r:
        model(torch.ones(2))
        model.append(Reducing())
        model(torch.ones(2))
    assert [call.module for call in r.calls()] == ["1"]


class Unhashable(nn.Module):
    """Compares by value, as some configuration-like modules do."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("not to be called")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x


def test_modules_that_compare_in_their_own_way_are_left_alone(fake_world: World) -> None:
    fake_world(2)
    module = Unhashable()
    with record() as r:
        module(torch.ones(2))
    assert [(call.module, call.phase) for call in r.calls()] == [("(root)", "forward")]


class Jealous(torch.Tensor):
    """A subclass that wants to be asked about everything."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ArithmeticError("not to be called")


def test_the_recorder_runs_no_code_of_a_tensor_subclass(fake_world: World) -> None:
    fake_world(2)
    tensor = torch.ones(3).as_subclass(Jealous)
    group = dist.distributed_c10d._get_default_group()
    with record() as r:
        group.allreduce([tensor], dist.AllreduceOptions())
    assert [(call.kind, call.inputs) for call in r.calls()] == [("all_reduce", ((3,),))]
