"""What users of CommDebugMode reach for, and what it must leave alone."""

from __future__ import annotations

import copy
import gc
import json
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as torch_modules

from commwatch.agent import record
from commwatch.agent.debug import CommDebugMode
from commwatch.agent.recorder import interpose
from commwatch.agent.recorder.local import RecordError
from tests.torch_release import RELEASE
from tests.unit.agent.debug import comm_programs as programs
from tests.unit.agent.debug.comm_programs import (
    Reduced,
    Trio,
    World,
    c10d,
    coalescing,
    functional,
    own_module_counts,
    world,
)

pytestmark = pytest.mark.filterwarnings("ignore")

EMPTY: Any = {"Global": {"forward": {}, "backward": {}}}


def test_entering_starts_anew(fake_world: World) -> None:
    mesh = fake_world(4)
    mode, first, second = CommDebugMode(), programs.mlp(mesh), programs.stacked(mesh)
    with mode:
        first()
    assert len(mode.advanced_module_tracker.module_helper_dict) == 5
    assert mode.comm_module_counts["MLPModule.net2"]["forward"][functional.all_reduce] == 1
    with mode:
        assert mode.get_parameter_info() == {}
        assert mode.get_sharding_info() == {}
        assert mode.get_total_counts() == 0
        assert mode.comm_module_counts == EMPTY
        assert mode.comm_module_own_counts == EMPTY
        assert list(mode.advanced_module_tracker.module_helper_dict) == ["Global"]
        second()
    assert len(mode.get_sharding_info()) == 8
    assert {name: list(found) for name, found in mode.get_parameter_info().items()} == {
        f"MLPStacked.layers.{layer}.{net}": ["weight", "bias"] for layer in range(2) for net in ("net1", "net2")
    }


def test_parameters_are_the_modules_own(fake_world: World) -> None:
    fake_world(4)
    model = Reduced()
    with CommDebugMode() as mode:
        model(torch.rand(3, 4))
    assert mode.get_parameter_info()["Reduced.linear"]["weight"].data_ptr() == model.linear.weight.data_ptr()
    assert mode.get_sharding_info() == {}


PLAIN: list[tuple[Any, Callable[[torch.Tensor, list[torch.Tensor]], Any]]] = [
    (c10d.allreduce_, lambda value, _: dist.all_reduce(value)),
    (c10d._allgather_base_, lambda value, _: dist.all_gather_into_tensor(value.new_empty(8, 8), value)),
    (c10d._reduce_scatter_base_, lambda value, _: dist.reduce_scatter_tensor(value, value.new_empty(8, 8))),
    (c10d.broadcast_, lambda value, _: dist.broadcast(value, 0)),
    (c10d.gather_, lambda value, parts: dist.gather(value, parts, 0)),
    (c10d.reduce_, lambda value, _: dist.reduce(value, 0)),
    (c10d.scatter_, lambda value, parts: dist.scatter(value, parts, 0)),
    (c10d.allgather_, lambda value, parts: dist.all_gather(parts, value)),
    (c10d.allgather_coalesced_, lambda value, parts: dist.all_gather_coalesced([[part] for part in parts], [value])),
    (c10d.allreduce_coalesced_, lambda value, _: dist.all_reduce_coalesced([value])),
    (c10d.reduce_scatter_, lambda value, parts: dist.reduce_scatter(value, parts)),
    (c10d.alltoall_, lambda value, parts: dist.all_to_all([torch.empty_like(value) for _ in parts], parts)),
    (c10d.alltoall_base_, lambda value, _: dist.all_to_all_single(value, value.clone())),
]


def test_plain_collectives_one_by_one_in_the_same_mode(fake_world: World) -> None:
    fake_world(2)
    mode = CommDebugMode()
    for key, run in PLAIN:
        with mode:
            run(torch.rand(4, 8), [torch.rand(4, 8) for _ in range(2)])
        assert mode.get_comm_counts() == {key: 1}
        assert repr(mode) == "CommDebugMode(get_total_counts()=1)"
    for key, call, values in (
        (c10d.allgather_into_tensor_coalesced_, dist.all_gather_into_tensor, (torch.rand(8, 8), torch.rand(4, 8))),
        (c10d.reduce_scatter_tensor_coalesced_, dist.reduce_scatter_tensor, (torch.rand(4, 8), torch.rand(8, 8))),
    ):
        with mode, coalescing():
            call(*values)
        assert mode.get_comm_counts() == {key: 1}


def test_coalesced_functional_collectives_keep_their_packet(fake_world: World) -> None:
    fake_world(2)
    with CommDebugMode() as mode:
        funcol.all_reduce_coalesced([torch.rand(4), torch.rand(4)], "sum", world())
    counts = mode.get_comm_counts()
    assert counts[functional.all_reduce_coalesced] == 1
    assert counts[functional.all_reduce] == 0
    assert mode.get_total_counts() == 1


def test_in_place_forms_count_as_their_functional_op(fake_world: World) -> None:
    fake_world(2)
    name = world().group_name
    native = torch.ops._c10d_functional
    with CommDebugMode() as mode:
        native.wait_tensor(native.all_reduce_(torch.rand(4), "sum", name))
        native.wait_tensor(native.all_gather_into_tensor_out(torch.rand(4), 2, name, out=torch.rand(8)))
    assert mode.get_comm_counts() == {functional.all_reduce: 1, functional.all_gather_into_tensor: 1}


def hooks_of(model: nn.Module) -> Any:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    everywhere = [
        dict(found)
        for name, found in vars(torch_modules).items()
        if name.startswith("_global_") and name.endswith(("_hooks", "_hooks_always_called", "_hooks_with_kwargs"))
    ]
    return everywhere, [[dict(getattr(module, kind)) for kind in kinds] for module in model.modules()]


@pytest.mark.parametrize("raises", [False, True])
def test_no_hook_stays_behind(fake_world: World, raises: bool) -> None:
    fake_world(4)
    model, value = Trio(), torch.rand(20, 10)
    before = copy.copy(hooks_of(model))
    assert len(before[0]) >= 4
    mode = CommDebugMode()
    try:
        with mode:
            model(value)
            assert hooks_of(model) != before
            if raises:
                raise ArithmeticError  # noqa: TRY301  the body's own
    except ArithmeticError:
        assert raises
    assert hooks_of(model) == before
    assert not interpose.installed()
    assert mode.get_total_counts() == 3
    model(value)
    assert mode.get_total_counts() == 3


@pytest.mark.skipif(RELEASE >= (2, 14), reason="torch 2.14 mended it")
def test_torch_leaves_a_hook_behind_on_a_module_called_twice(fake_world: World) -> None:
    fake_world(4)
    model, value = Reduced(), torch.rand(3, 4)
    with pytest.raises(IndexError), TorchCommDebugMode():
        [model(value) for _ in range(2)]
    assert len(model._forward_hooks) == 1


def test_a_module_called_twice_keeps_no_hook(fake_world: World) -> None:
    fake_world(4)
    model, value = Reduced(), torch.rand(3, 4)
    with CommDebugMode() as mode:
        [model(value) for _ in range(2)]
    assert len(model._forward_hooks) == 0
    assert mode.get_total_counts() == 2


def test_the_same_mode_inside_itself_goes_on(fake_world: World) -> None:
    fake_world(4)
    model, value, mode = Reduced(), torch.rand(3, 4), CommDebugMode()
    with mode:
        model(value)
        with mode:
            model(value)
        model(value)
    assert mode.advanced_module_tracker.name == "Global"
    assert not interpose.installed()
    assert own_module_counts(mode) == {("Reduced", "forward"): {functional.all_reduce: 3}}


def test_two_modes_and_a_recorder_see_the_same(fake_world: World) -> None:
    mesh = fake_world(4)
    program = programs.sequence_parallel_with_input_grad(mesh)
    with record() as recorded, CommDebugMode() as outer, CommDebugMode() as inner:
        program()
    assert outer.get_comm_counts() == inner.get_comm_counts()
    assert own_module_counts(outer) == own_module_counts(inner)
    assert outer.get_total_counts() == sum(recorded.counts().values()) == 4


class EntersInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Reduced()

    def forward(self, value: torch.Tensor) -> Any:
        with CommDebugMode() as mode:
            self.layer(value)
        return mode


def test_a_mode_entered_in_forward_names_modules_from_the_first_it_sees(fake_world: World) -> None:
    fake_world(4)
    assert own_module_counts(EntersInside()(torch.rand(3, 4))) == {("Reduced", "forward"): {functional.all_reduce: 1}}


class Enters(nn.Module):
    def forward(self, mode: Any) -> None:
        mode.__enter__()


def test_calls_after_the_one_a_mode_was_entered_in_belong_to_their_modules(fake_world: World) -> None:
    fake_world(4)
    mode, value, model, enters = CommDebugMode(), torch.rand(3, 4), Reduced(), Enters()
    enters.register_forward_hook(lambda *_: None)  # so that its call is as deep as those that follow
    enters(mode)
    for _ in range(20):
        model(value)
    mode.__exit__(None, None, None)
    assert own_module_counts(mode) == {("Reduced", "forward"): {functional.all_reduce: 20}}


def test_backward_of_a_forward_before_the_mode_belongs_to_global(fake_world: World) -> None:
    fake_world(4)
    model = Reduced()
    loss = model(torch.rand(3, 4)).sum()
    with CommDebugMode() as mode:
        loss.backward()
    assert own_module_counts(mode) == {("Global", "backward"): {functional.all_reduce: 1}}


def test_a_module_without_a_forward_in_the_mode_is_run_again_in_backward(fake_world: World) -> None:
    fake_world(4)
    model = programs.Checkpointed(reentrant=False)
    loss = model(torch.rand(3, 4, requires_grad=True)).sum()
    with CommDebugMode() as mode:
        loss.backward()
    assert mode.get_total_counts() == 3
    assert own_module_counts(mode)["Reduced", "backward"] == {functional.all_reduce: 1}


def test_simulated_ranks_are_counted_and_traced_ones_are_not(fake_world: World) -> None:
    fake_world(4)
    with CommDebugMode() as mode, FakeTensorMode():
        Reduced()(torch.rand(3, 4)).sum().backward()
    assert own_module_counts(mode) == {
        ("Reduced", "forward"): {functional.all_reduce: 1},
        ("Reduced", "backward"): {functional.all_reduce: 1},
    }
    with CommDebugMode() as mode:
        make_fx(lambda value: funcol.all_reduce(value, "sum", world()) + 1, tracing_mode="fake")(torch.rand(4))
    assert mode.get_total_counts() == 0


def test_higher_order_ops_pass(fake_world: World) -> None:
    mesh = fake_world(4)
    value = distribute_tensor(torch.rand(8, 8), mesh, [Shard(0)])
    with CommDebugMode() as mode:
        dropped: Any = nn.functional.dropout(value, 0.5)
        dropped.redistribute(placements=[Replicate()]).to_local()
    assert mode.get_comm_counts() == {functional.all_gather_into_tensor: 1}


def test_noise_levels_filter(fake_world: World, tmp_path: Path) -> None:
    mesh = fake_world(4)
    program = programs.mlp(mesh)
    with CommDebugMode() as mode:
        program()
    tables = [mode.generate_comm_debug_tracing_table(noise_level) for noise_level in range(4)]
    assert [len(table) for table in tables] == sorted({len(table) for table in tables})
    assert "aten" not in tables[0]
    assert "module type" not in tables[0]
    assert "aten.t.default" not in tables[2]
    assert "aten.t.default" in tables[3]
    assert "\033[1;33m" in tables[0]
    file = tmp_path / "table.txt"
    mode.log_comm_debug_tracing_table_to_file(str(file), 0)
    assert "\033" not in file.read_text()
    assert file.read_text().startswith("Global\n  FORWARD PASS\n    *c10d_functional.all_reduce: 1\n")


def test_operation_lists_are_bounded(fake_world: World, tmp_path: Path) -> None:
    fake_world(4)

    class Bounded(CommDebugMode):
        MAX_OPERATIONS = 10

    with Bounded() as mode:
        Reduced()(torch.rand(3, 4))
        for _ in range(20):
            torch.rand(2).add(1)
    listed = sum(len(found["operations_list"]) for found in mode.comm_module_operation_counts.values())
    assert listed == 10
    left_out = mode.operations_left_out["Global"]
    assert left_out > 20
    assert f"\n  {left_out} operations left out\n" in mode.generate_comm_debug_tracing_table(1)
    assert "left out" not in mode.generate_comm_debug_tracing_table(0)
    file = tmp_path / "dump.json"
    mode.generate_json_dump(str(file))
    assert json.loads(file.read_text())["operations_left_out"] == left_out
    assert mode.get_total_counts() == 1


def test_no_tensor_and_no_module_is_kept(fake_world: World) -> None:
    fake_world(4)
    mode = CommDebugMode()
    with mode:
        model, value = nn.Sequential(nn.ReLU(), nn.Tanh()), torch.rand(3, 4, requires_grad=True)
        result = funcol.all_reduce(model(value), "sum", world())
        result.sum().backward()
        kept = [weakref.ref(found) for found in (value, result, value.grad, model, model[0])]
        del model, value, result
        gc.collect()
        assert [reference() for reference in kept] == [None] * 5
    assert mode.get_total_counts() == 2


@pytest.mark.parametrize("broken", ["locate", "_enter", "_name_at", "_start"])
def test_what_fails_inside_does_not_reach_the_job(
    fake_world: World, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_world(4)
    torch.manual_seed(0)
    model, value = Reduced(), torch.rand(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(model(value).sum(), value)
    mode = CommDebugMode()

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(mode.advanced_module_tracker, broken, fail)
    with caplog.at_level(logging.WARNING), mode:
        (found,) = torch.autograd.grad(model(value).sum(), value)
    assert torch.equal(found, expected)
    assert len(caplog.records) == 1
    assert "CommDebugMode missed an op" in caplog.text


def test_neither_import_nor_use_loads_the_compiler() -> None:
    code = """
import sys, torch
from commwatch.agent.debug import CommDebugMode
assert "torch._dynamo" not in sys.modules
with CommDebugMode() as mode:
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
assert "torch._dynamo" not in sys.modules
assert mode.comm_module_operation_counts["Linear"]["operations_list"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_torch_that_lacks_something_is_refused_on_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    before = hooks_of(nn.Linear(1, 1))
    with pytest.raises(RecordError, match=r"this torch lacks torch\._C\._current_graph_task_id"):
        CommDebugMode().__enter__()
    assert hooks_of(nn.Linear(1, 1)) == before
    assert not interpose.installed()
