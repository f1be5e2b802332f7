"""What code written for torch's ``DebugMode`` relies on, and where ours goes beyond it."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._debug_mode import DebugMode as TorchDebugMode
from torch.utils._debug_mode import get_active_debug_mode
from torch.utils._debug_mode._calls import _OpCall, _RedistributeCall
from torch.utils._python_dispatch import TorchDispatchMode

from commwatch.agent.debug import DebugMode
from commwatch.agent.debug.snapshot import MAX_SPECS, as_text
from tests.unit.agent.debug import programs

World = Callable[..., DeviceMesh]


class Passes(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _enter(mode: Any) -> Any:
    """An instance: the constructors of torch's modes are not annotated."""
    return mode()


def test_records_are_those_torch_users_know(fake_world: World) -> None:
    run = programs.mm(fake_world(8))
    with DebugMode(record_torchfunction=True) as mode:
        run()
    assert isinstance(mode, TorchDebugMode)
    assert isinstance(mode.operators[0], _OpCall)
    assert isinstance(mode.operators[3], _RedistributeCall)
    assert next(iter(mode.operators[1])) == torch.ops.aten.mm.default
    assert tuple(mode.operators[3]) == ("redistribute_input", ["1", "S(0)", "R"], {}, 2)
    assert mode.logs == mode.operators
    assert mode.logs is not mode.operators
    assert "redistribute_input" in repr(mode.operators[3])


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_other_modes_around_and_inside(outer: bool, inner: bool, fake_world: World) -> None:
    run = programs.mm(fake_world(8))
    around, inside = [_enter(Passes) if wanted else contextlib.nullcontext() for wanted in (outer, inner)]
    with around, DebugMode() as mode, inside:
        run()
    assert "redistribute_input [implicit] (1, S(0) -> R)" in mode.debug_string()


def test_torch_s_own_mode_inside_ours_sees_what_it_saw_alone(fake_world: World) -> None:
    mesh = fake_world(8)
    with TorchDebugMode() as alone:
        programs.mm_backward(mesh)()
    with DebugMode() as ours, TorchDebugMode() as theirs:
        programs.mm_backward(mesh)()
    assert theirs.debug_string() == alone.debug_string()
    assert "redistribute_input [implicit] (1, S(0) -> R)" in ours.debug_string()
    assert get_active_debug_mode() is None


def test_the_text_is_the_same_inside_and_after(fake_world: World) -> None:
    run = programs.mm(fake_world(8))
    with DebugMode() as mode:
        run()
        inside = mode.debug_string()
    assert mode.debug_string() == inside


def test_a_mode_is_entered_again_and_reset() -> None:
    mode = DebugMode(record_ids=True)
    for expected in (1, 2):
        with mode:
            torch.ones(2).sin()
        assert len(mode.operators) == 2 * expected
    mode.reset()
    assert mode.operators == []
    with mode:
        torch.ones(2)
    assert "t$0: f32[2]" in mode.debug_string()


def test_higher_order_ops_are_seen() -> None:
    x = torch.ones(1, 8)
    with DebugMode(record_torchfunction=True) as mode:
        torch.ops.higher_order.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (x,))
    assert "torch.ops.higher_order.cond" in mode.debug_string()


def test_attributes_and_original_arguments() -> None:
    x, y = torch.ones(8, 8), torch.ones(8, 8, 8)
    x.a1, x.a2, y.a1 = "x1", "x2", "y"  # type: ignore[attr-defined]  # attributes of the user's own
    flags: dict[str, Any] = {"record_torchfunction": True, "record_tensor_attributes": ["a1", "a2"]}
    with DebugMode(store_original_args=True, **flags) as mode:
        torch.matmul(y, x)
    assert mode.debug_string().splitlines()[0] == (
        "  torch.matmul(t: f32[8, 8, 8]{a1=y}, t: f32[8, 8]{a1=x1, a2=x2})  ->  t: f32[8, 8, 8]"
    )
    assert mode.operators[0].args[0] is y
    with DebugMode(**flags) as mode:
        torch.matmul(y, x)
    assert not hasattr(mode.operators[0], "args")


def test_stacks_reach_from_backward_to_the_forward_line_without_anomaly_mode() -> None:
    model, x = programs.Outer(), torch.ones(4, 4)
    with DebugMode(record_stack_trace=True) as mode:
        assert not torch.is_anomaly_enabled()
        loss = model(x).sum()
        loss.backward()
    sums = [call for call in mode.operators if str(call.op) == "aten.sum.dim_IntList"]
    assert "self.second(self.first(x))" in sums[-1].fwd_stack_trace
    assert "loss.backward()" in sums[-1].stack_trace
    assert "self.second(self.first(x))" in mode.debug_string(show_stack_trace=True)
    assert mode.operators[0].fwd_stack_trace is None
    with DebugMode() as mode:
        model(x)
    assert not hasattr(mode.operators[0], "stack_trace")


def test_text_with_stacks_equals_torch_s() -> None:
    texts = []
    for kind in (TorchDebugMode, DebugMode):
        run = programs.modules()
        with kind(record_stack_trace=True, record_nn_module=True) as mode:
            run()
        texts.append(mode.debug_string())
    assert texts[1] == texts[0]
    assert "out: torch.Tensor = self.second(self.first(x))" in texts[0]


def test_annotations() -> None:
    with DebugMode() as mode:
        DebugMode._annotate("here")
        torch.ones(1)
    assert mode.operators[0].render([]) == "[annotate] here"
    assert len(mode.operators) == 2


def test_hashes_of_outputs_and_inputs_are_torch_s(fake_world: World) -> None:
    fake_world(2)
    x = torch.arange(6.0).view(2, 3)
    logs = []
    for kind in (TorchDebugMode, DebugMode):
        with kind() as mode, DebugMode.log_tensor_hashes(hash_fn=["norm", "hash_tensor"], hash_inputs=True):
            x.sin().add_(1).sum()
        logs.append(mode.logs)
    assert [call.log for call in logs[1]] == [call.log for call in logs[0]]
    assert [call.render([]) for call in logs[1]] == [call.render([]) for call in logs[0]]
    assert DebugMode.check_hash_mismatches(logs[0][:0], logs[1][:0]) == []


def test_mismatching_hashes_are_found() -> None:
    def logs(x: torch.Tensor, *, longer: bool = False) -> list[Any]:
        with DebugMode() as mode, DebugMode.log_tensor_hashes():
            out = x.sin().sum()
            if longer:
                out.cos()
        return list(mode.logs)

    x, other = torch.ones(8, 8), torch.full((8, 8), 0.5)
    assert DebugMode.check_hash_mismatches(logs(x), logs(x)) == []
    found = DebugMode.check_hash_mismatches(logs(x), logs(other))
    assert [mismatch["call"] for mismatch in found] == ["aten::sin", "aten::sum"]
    with pytest.raises(ValueError, match="Log lengths don't match"):
        DebugMode.check_hash_mismatches(logs(x), logs(x, longer=True))


def test_hooks_and_recorded_outputs() -> None:
    seen: list[Any] = []

    def hook(func: Any, types: Any, args: Any, kwargs: Any, result: Any) -> dict[str, Any]:
        seen.append(func)
        return {"numel": result.numel()}

    x = torch.ones(3)
    with DebugMode() as mode, DebugMode.dispatch_hooks(log_hook=hook), DebugMode.record_outputs():
        out = x.sin()
    assert seen == [torch.ops.aten.sin.default]
    assert mode.operators[0].log == {"numel": 3}
    assert torch.equal(mode.operators[0].record["output"], out)
    assert mode.debug_string() == "    aten::sin(t: f32[3])  ->  t: f32[3]  # {'numel': 3}"


def test_complete_text_names_groups_and_meshes(fake_world: World) -> None:
    mesh = fake_world(4, 2, names=("dp", "tp"))
    x = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Replicate()], run_check=False)
    with DebugMode() as mode:
        x + x
        x.full_tensor()
        dist.all_reduce(torch.ones(3), group=mesh.get_group("tp"))
    out = "[t: f32[3]], ScriptObject <__torch__.torch.classes.c10d.Work>"
    boxed = "ScriptObject <__torch__.torch.classes.c10d"
    assert mode.debug_string(complete=True).splitlines() == [
        "  aten::add.Tensor(dt: f32[8, 2]| S(0)R on DM(4, 2), dt: f32[8, 2]| S(0)R on DM(4, 2))",
        "    aten::add.Tensor(t: f32[2, 2], t: f32[2, 2])  ->  t: f32[2, 2]",
        "    redistribute_input [explicit] (t: f32[2, 2], trace: S(0)R->RR)",
        "      _c10d_functional::all_gather_into_tensor(t: f32[2, 2], 4, dp(size 4, stride 2))  ->  t: f32[8, 2]",
        "      _c10d_functional::_wrap_tensor_autograd(t: f32[8, 2])  ->  t: f32[8, 2]",
        "      _c10d_functional::wait_tensor(t: f32[8, 2])  ->  t: f32[8, 2]",
        "    aten::view(t: f32[8, 2], [8, 2])  ->  t: f32[8, 2]",
        "    aten::ones([3], device=cpu, pin_memory=False)  ->  t: f32[3]",
        f"    c10d::allreduce_([t: f32[3]], tp(size 2, stride 1), {boxed}.ReduceOp>, None, False)  ->  ({out})",
    ]


def test_modules_neither_add_ops_nor_lose_their_depth() -> None:
    """torch's tracker runs a view of each leaf input; ours runs nothing. Caught exceptions leave no depth behind."""
    model, x = programs.Outer(), torch.ones(4, 4, requires_grad=True)
    with DebugMode() as plain:
        model(x)
    with DebugMode(record_nn_module=True) as mode:
        model(x)
        programs.caught_exception()()
        torch.ones(1)
    ops = [str(call.op) for call in mode.operators if hasattr(call, "op")]
    assert ops[: len(plain.operators)] == [str(call.op) for call in plain.operators]
    assert mode.call_depth == 0
    assert mode.operators[-1].call_depth == 1
    assert nn.modules.module._global_forward_hooks == {}


def test_no_tensor_is_kept_alive(fake_world: World) -> None:
    mesh = fake_world(8)
    born: list[weakref.ref[torch.Tensor]] = []

    class Watches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                born.append(weakref.ref(out))
            return out

    flags: dict[str, Any] = {"record_torchfunction": True, "record_nn_module": True, "record_ids": True}
    with _enter(Watches), DebugMode(record_stack_trace=True, **flags) as mode:
        programs.mlp_tensor_parallel(mesh)()
    gc.collect()
    assert len(born) > 20
    assert [reference for reference in born if reference() is not None] == []
    assert mode.debug_string()


def test_records_are_bounded_and_the_rest_is_counted() -> None:
    x = torch.ones(2)
    with DebugMode(max_records=3) as mode:
        for _ in range(5):
            x.sin()
    assert len(mode.operators) == 3
    assert mode.dropped_records == 2
    assert mode.debug_string(complete=True).splitlines()[-1] == ("  (2 further records were not kept: max_records=3)")


def test_memory_is_flat_over_a_thousand_steps() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    mode = DebugMode(record_nn_module=True)

    def step() -> None:
        with mode:
            model(x).sum().backward()
        mode.reset()

    tracemalloc.start()
    for _ in range(100):
        step()
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(1000):
        step()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Python's free lists take some: 100 bytes a step, where a step makes about thirty records.
    assert after - before < 100_000


def test_compiled_code_is_compiled_as_without_the_mode() -> None:
    def program(mode: Any) -> tuple[int, int]:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")

        @torch.compile(backend=counter)
        def function(x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            torch._dynamo.graph_break()
            return y.cos() + 1

        with mode:
            for _ in range(3):
                function(torch.ones(8))
        function(torch.ones(8))
        return counter.frame_count, counter.op_count

    assert program(DebugMode()) == program(contextlib.nullcontext()) == (2, 3)


def test_compiled_modules_are_compiled_as_without_the_mode() -> None:
    def program(mode: Any) -> int:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model = torch.compile(programs.Outer(), backend=counter, fullgraph=True)
        with mode:
            for _ in range(2):
                model(torch.ones(4, 4)).sum().backward()
        return counter.frame_count

    assert program(DebugMode(record_nn_module=True)) == program(contextlib.nullcontext()) == 1


def test_neither_dynamo_nor_inductor_is_loaded_for_it() -> None:
    code = (
        "import sys, torch\n"
        "from commwatch.agent.debug import DebugMode\n"
        "with DebugMode(record_nn_module=True) as mode:\n"
        "    torch.nn.Linear(2, 2)(torch.ones(2, 2)).sum().backward()\n"
        "assert len(mode.operators) > 5\n"
        "heavy = ('torch._dynamo.convert_frame', 'torch._inductor.compile_fx')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_a_value_that_cannot_be_shown_does_not_harm() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    assert str(as_text(Odd())) == "<Odd: RuntimeError in its __str__>"


def test_a_storage_is_shown_by_its_size() -> None:
    x = torch.ones(300)
    with DebugMode(record_torchfunction=True) as mode:
        x.untyped_storage().resize_(0)
    assert "<UntypedStorage of 1200 bytes on cpu>" in mode.debug_string()


def test_what_dtensor_makes_anew_at_every_step_is_not_kept(fake_world: World) -> None:
    run = programs.mlp_tensor_parallel(fake_world(8))
    mode = DebugMode()
    sizes = []
    for _ in range(120):
        with mode:
            run()
        mode.reset()
        sizes.append(len(mode._snapshots._specs))
    assert max(sizes) <= MAX_SPECS
    assert sum(sizes) > MAX_SPECS  # the program does make new ones
