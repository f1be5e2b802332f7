"""Exact counts where torch's CommDebugMode is wrong, and that it is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from commwatch.agent.debug import CommDebugMode
from tests.torch_release import RELEASE
from tests.unit.agent.debug import comm_programs as programs
from tests.unit.agent.debug.comm_programs import (
    Checkpointed,
    Reduced,
    World,
    c10d,
    functional,
    nonempty,
    own_module_counts,
    world,
)

pytestmark = pytest.mark.filterwarnings("ignore")

REDUCE = functional.all_reduce


TORCH_FAILS_AT_A_SECOND_CALL = RELEASE < (2, 14)
"""torch's mode removes the hook of a module's first call at its second; 2.14 mended that."""


def torchs_mode_fails(error: type[Exception]) -> Any:
    """What torch's mode raises where a module is called twice."""
    return pytest.raises(error) if TORCH_FAILS_AT_A_SECOND_CALL else contextlib.nullcontext()


def counted(program: Callable[[], Any], mode: Any = None) -> Any:
    mode = mode or CommDebugMode()
    with mode:
        program()
    return mode


def names_of(operations: list[dict[str, Any]]) -> list[str]:
    names = [str(operation["name"]) for operation in operations]
    return [name for name in names if name != "aten.detach.default"]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Reduced()

    def forward(self, value: torch.Tensor) -> Any:
        return funcol.all_reduce(self.layer(self.layer(value)), "sum", world())


def test_a_module_called_twice(fake_world: World) -> None:
    fake_world(4)
    model, value = Reduced(), torch.rand(3, 4)
    with torchs_mode_fails(IndexError):
        counted(lambda: (model(value), model(value)), TorchCommDebugMode())
    model = Reduced()
    mode = counted(lambda: (model(value), model(value)))
    assert own_module_counts(mode) == {("Reduced", "forward"): {REDUCE: 2}}
    assert mode.advanced_module_tracker.parent_dict == {"Global": ["Reduced"], "Reduced": ["Reduced.linear"]}


def test_a_module_called_twice_in_the_same_parent(fake_world: World) -> None:
    fake_world(4)
    value = torch.rand(3, 4)
    with torchs_mode_fails(IndexError):
        counted(lambda: Twice()(value).sum().backward(), TorchCommDebugMode())
    mode = counted(lambda: Twice()(value).sum().backward())
    assert own_module_counts(mode) == {
        ("Twice", "forward"): {REDUCE: 1},
        ("Twice", "backward"): {REDUCE: 1},
        ("Twice.layer", "forward"): {REDUCE: 2},
        ("Twice.layer", "backward"): {REDUCE: 2},
    }
    assert nonempty(mode.comm_module_counts)["Twice", "backward"] == {REDUCE: 3}


class Raises(nn.Module):
    def forward(self, value: torch.Tensor) -> Any:
        funcol.all_reduce(value, "sum", world())
        raise ValueError


class Catches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bad, self.good = Raises(), Reduced()
        self.seen: list[tuple[str, set[str]]] = []

    def forward(self, value: torch.Tensor, tracker: Any) -> Any:
        try:
            self.bad(value)
        except ValueError:
            self.seen.append((tracker.name, tracker.parents))
        return self.good(funcol.all_reduce(value, "sum", world()))


def test_an_exception_caught_in_forward(fake_world: World) -> None:
    fake_world(4)
    value, theirs = torch.rand(3, 4), TorchCommDebugMode()
    counted(lambda: Catches()(value, theirs.advanced_module_tracker), theirs)
    assert theirs.advanced_module_tracker.parent_dict["Catches.bad"] == ["Catches.good"]
    assert theirs.comm_module_counts["Catches.bad"]["forward"] == {REDUCE: 3}

    model, mode = Catches(), CommDebugMode()
    counted(lambda: model(value, mode.advanced_module_tracker), mode)
    assert model.seen == [("Catches", {"Global", "Catches"})]
    assert mode.advanced_module_tracker.name == "Global"
    assert mode.advanced_module_tracker.parents == {"Global"}
    assert own_module_counts(mode) == {
        ("Catches", "forward"): {REDUCE: 1},
        ("Catches.bad", "forward"): {REDUCE: 1},
        ("Catches.good", "forward"): {REDUCE: 1},
    }


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_a_pipeline_schedule_calls_its_stage_once_for_each_micro_batch(fake_world: World, schedule: Any) -> None:
    fake_world(1)

    def step() -> None:
        example = torch.rand(2, 4)
        stage = PipelineStage(Reduced(), 0, 1, torch.device("cpu"), input_args=(example,), output_args=(example,))
        schedule(stage, 4, loss_fn=nn.MSELoss()).step(torch.rand(8, 4), target=torch.rand(8, 4))

    with torchs_mode_fails(RuntimeError):
        counted(step, TorchCommDebugMode())
    mode = counted(step)
    assert own_module_counts(mode)["Reduced", "backward"] == {REDUCE: 4}
    assert own_module_counts(mode)["Reduced", "forward"] == {REDUCE: 4}


CHECKPOINTED = [
    (False, {"Checkpointed.first": 2, "Checkpointed.second": 1}),
    (True, {"Checkpointed.first": 2, "Checkpointed.second": 2}),
]


@pytest.mark.parametrize(("reentrant", "backward"), CHECKPOINTED)
def test_activation_checkpointing(fake_world: World, reentrant: bool, backward: dict[str, int]) -> None:
    fake_world(4)
    value = torch.rand(3, 4, requires_grad=True)
    theirs = counted(lambda: Checkpointed(reentrant)(value).sum().backward(), TorchCommDebugMode())
    assert theirs.comm_module_counts["Checkpointed.first.linear"]["backward"] == {REDUCE: 1}

    mode = counted(lambda: Checkpointed(reentrant)(value).sum().backward())
    assert own_module_counts(mode) == {
        ("Checkpointed.first", "forward"): {REDUCE: 1},
        ("Checkpointed.second", "forward"): {REDUCE: 1},
        **{(name, "backward"): {REDUCE: count} for name, count in backward.items()},
    }
    again = {
        name: names_of(
            [operation for operation in listed["operations_list"] if operation["is_activation_checkpointing"]]
        )
        for name, listed in mode.comm_module_operation_counts.items()
    }
    reduced = ["_c10d_functional.all_reduce.default", "_c10d_functional._wrap_tensor_autograd.default"]
    assert again["Checkpointed"] == ["aten.relu.default"]
    assert again["Checkpointed.first"] == reduced
    assert again["Checkpointed.second"] == (reduced if reentrant else [])
    assert again["Checkpointed.first.linear"][-1] == "aten.addmm.default"
    assert again["Global"] == []
    table = mode.generate_comm_debug_tracing_table(2).split("Checkpointed.second.linear")[0]
    section = table.split("ACTIVATION CHECKPOINTING")
    assert len(section) == (5 if reentrant else 4)
    assert "aten.relu.default" in section[1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_of_a_checkpointed_forward_is_no_checkpointing(fake_world: World, reentrant: bool) -> None:
    fake_world(4)
    value = torch.rand(3, 4, requires_grad=True)
    mode = counted(lambda: Checkpointed(reentrant)(value).sum().backward())
    report = mode.comm_module_operation_counts["Checkpointed.first.linear"]["operations_list"]
    plain = [op for op in report if op["is_bw"] and not op["is_activation_checkpointing"]]
    assert names_of(plain).count("aten.mm.default") == 2


def test_other_threads(fake_world: World) -> None:
    fake_world(4)
    model, value = Reduced(), torch.rand(3, 4)

    def on_another_thread() -> None:
        def work() -> None:
            model(value)
            dist.all_reduce(value)
            funcol.all_reduce(value, "sum", world())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert counted(on_another_thread, TorchCommDebugMode()).get_total_counts() == 0
    assert own_module_counts(counted(on_another_thread)) == {
        ("Global", "forward"): {c10d.allreduce_: 1, REDUCE: 1},
        ("Reduced", "forward"): {REDUCE: 1},
    }


def test_many_threads_at_once_are_counted_exactly(fake_world: World) -> None:
    fake_world(4)
    value = torch.rand(3, 4)

    def everywhere() -> None:
        def work() -> None:
            model = Reduced()
            for _ in range(50):
                model(value)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()

    assert own_module_counts(counted(everywhere)) == {("Reduced", "forward"): {REDUCE: 250}}


def test_ops_torchs_table_does_not_know(fake_world: World) -> None:
    fake_world(4)
    value = torch.rand(3, 4)

    def talk() -> None:
        dist.send(value, 1)
        dist.recv(value, 1)
        dist.barrier()

    assert counted(talk, TorchCommDebugMode()).get_total_counts() == 0
    assert counted(talk).get_comm_counts() == {c10d.send: 1, c10d.recv_: 1, c10d.barrier: 1}


class Foreign(torch.Tensor):
    """A subclass that communicates when it is multiplied."""

    plain: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        wrapper: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.plain = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as if it were bound
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = tree_map(lambda value: value.plain if isinstance(value, cls) else value, args)
        out = func(*plain, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            dist.all_reduce(out)
            out = funcol.wait_tensor(funcol.all_reduce(out, "sum", world()))
        return out


class Multiplies(nn.Module):
    def forward(self, value: torch.Tensor) -> Any:
        return value @ torch.rand(4, 4)


def test_collectives_inside_a_foreign_subclass(fake_world: World) -> None:
    fake_world(4)
    value = Foreign(torch.rand(4, 4))
    assert counted(lambda: Multiplies()(value), TorchCommDebugMode()).get_total_counts() == 0
    mode = counted(lambda: Multiplies()(value))
    assert own_module_counts(mode) == {("Multiplies", "forward"): {c10d.allreduce_: 1, REDUCE: 1}}


class Announces(Foreign):
    """A subclass that carries out a functional all_reduce as a barrier and two other collectives."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as if it were bound
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops._c10d_functional.all_reduce.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        dist.barrier()
        part = funcol.reduce_scatter_tensor(args[0].plain, "sum", 0, world())
        return funcol.wait_tensor(funcol.all_gather_tensor(part, 0, world()))


def test_a_functional_collective_carried_out_as_others_counts_as_those(fake_world: World) -> None:
    fake_world(4)
    value = Announces(torch.rand(4, 4))
    mode = counted(lambda: torch.ops._c10d_functional.all_reduce(value, "sum", world().group_name))
    assert mode.get_comm_counts() == {
        c10d.barrier: 1,
        functional.reduce_scatter_tensor: 1,
        functional.all_gather_into_tensor: 1,
    }


class Passes(TorchDispatchMode):
    """A mode of somebody else, which handles every op by calling it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's base is untyped

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_other_modes_around_and_inside_change_nothing(fake_world: World) -> None:
    fake_world(4)
    model, value = Reduced(), torch.rand(3, 4)

    def run() -> None:
        with Passes():
            model(value)
            dist.all_reduce(value)

    mode = CommDebugMode()
    with Passes():
        counted(run, mode)
    assert own_module_counts(mode) == {
        ("Global", "forward"): {c10d.allreduce_: 1},
        ("Reduced", "forward"): {REDUCE: 1},
    }


def test_other_modes_on_another_thread_do_not_hide_the_functional_op(fake_world: World) -> None:
    fake_world(4)
    value = torch.rand(3, 4)

    def work() -> None:
        with Passes(), Passes():
            funcol.all_reduce(value, "sum", world())
            dist.all_reduce(value)

    def on_another_thread() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert counted(on_another_thread).get_comm_counts() == {REDUCE: 1, c10d.allreduce_: 1}


def test_fsdp2_backward_belongs_to_the_modules_that_were_sharded(fake_world: World) -> None:
    mesh = fake_world(4)
    program = programs.fsdp2(mesh, backward=True)
    theirs = counted(programs.fsdp2(mesh, backward=True), TorchCommDebugMode())
    assert theirs.comm_module_counts["FSDPTransformer.tok_embeddings"]["backward"] == {c10d._reduce_scatter_base_: 1}

    layer = {c10d._allgather_base_: 1, c10d._reduce_scatter_base_: 1}
    assert own_module_counts(counted(program)) == {
        ("FSDPTransformer", "forward"): {c10d._allgather_base_: 1},
        ("FSDPTransformer", "backward"): {c10d._reduce_scatter_base_: 1},
        ("FSDPTransformer.layers.0", "forward"): {c10d._allgather_base_: 1},
        ("FSDPTransformer.layers.0", "backward"): layer,
        ("FSDPTransformer.layers.1", "forward"): {c10d._allgather_base_: 1},
        ("FSDPTransformer.layers.1", "backward"): layer,
    }


def test_backward_of_a_parents_own_redistribute_belongs_to_the_parent(fake_world: World) -> None:
    mesh = fake_world(4)
    scatter = {functional.reduce_scatter_tensor: 1}
    theirs = counted(programs.transformer(mesh, sequence=True, backward=True), TorchCommDebugMode())
    assert theirs.comm_module_counts["Transformer.layers.0.attention.wq"]["backward"] == scatter
    mode = counted(programs.transformer(mesh, sequence=True, backward=True))
    assert mode.get_comm_counts() == theirs.get_comm_counts()
    own = own_module_counts(mode)
    assert own["Transformer.layers.0.attention", "backward"] == scatter
    assert ("Transformer.layers.0.attention.wq", "backward") not in own


def test_the_optimizer_is_no_module(fake_world: World) -> None:
    fake_world(4)

    def train() -> None:
        model, value = Reduced(), torch.rand(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.register_step_pre_hook(lambda *_: dist.all_reduce(value))
        model(value).sum().backward()
        optimizer.step()

    theirs = counted(train, TorchCommDebugMode())
    assert theirs.comm_module_counts["Reduced.linear"]["forward"] == {c10d.allreduce_: 1}
    assert own_module_counts(counted(train)) == {
        ("Global", "forward"): {c10d.allreduce_: 1},
        ("Reduced", "forward"): {REDUCE: 1},
        ("Reduced", "backward"): {REDUCE: 1},
    }


def test_double_backward(fake_world: World) -> None:
    fake_world(4)
    model, value = Twice(), torch.rand(3, 4, requires_grad=True)

    def twice() -> None:
        loss = model(value).pow(2).sum()
        (gradient,) = torch.autograd.grad(loss, value, create_graph=True)
        gradient.pow(2).sum().backward()

    mode = counted(twice)
    total = sum(sum(found.values()) for found in own_module_counts(mode).values())
    assert total == mode.get_total_counts() > 6
    assert ("Global", "backward") not in own_module_counts(mode)


def test_gradients_of_a_forward_on_another_thread(fake_world: World) -> None:
    fake_world(4)
    value, outputs = torch.rand(3, 4), []

    def across() -> None:
        model = Twice()
        thread = threading.Thread(target=lambda: outputs.append(model(value)))
        thread.start()
        thread.join()
        outputs[0].sum().backward()

    own = own_module_counts(counted(across))
    assert own["Twice", "backward"] == {REDUCE: 1}
    assert own["Twice.layer", "backward"] == {REDUCE: 2}
