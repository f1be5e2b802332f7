"""Captured steps of a real training loop, on the fake process group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from commwatch.agent.capture import capturer as capturer_module
from commwatch.agent.capture.plan import Plan
from commwatch.agent.recorder import meshes
from commwatch.agent.recorder.recorder import Recorder
from commwatch.v1 import records_pb2
from tests.unit.agent.recorder.memory_sink import MemorySink

World = Callable[..., DeviceMesh]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


class Job:
    """A tensor-parallel MLP that trains under a recorder."""

    def __init__(self, mesh: DeviceMesh, plan: Plan) -> None:
        self.errors: list[BaseException] = []
        self.sink = MemorySink()
        self.recorder = Recorder(self.sink, Path(__file__).parent, self.errors.append, plan)
        meshes.learn_living(self.recorder.observer.groups)
        self.model = parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.recorder.start()

    def step(self) -> None:
        self.model(torch.ones(4, 8, requires_grad=True)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> None:
        self.recorder.stop()
        self.recorder.finish()
        assert self.errors == []


def kind_of(call: records_pb2.CapturedCall) -> str:
    return records_pb2.CapturedKind.Name(call.kind).removeprefix("CAPTURED_KIND_").lower()


def nodes(part: records_pb2.Capture) -> list[tuple[int, str, str]]:
    """(depth, kind, name) of each record."""
    return [(record.depth, kind_of(part.calls[record.call]), part.calls[record.call].name) for record in part.records]


def collectives(part: records_pb2.Capture) -> list[tuple[str, str, str, str, int]]:
    """(op, kind, phase, module, position) of each record that issued one."""
    found = []
    for record in part.records:
        call = part.calls[record.call]
        found += [(call.name, issued.kind, issued.phase, issued.module, record.position) for issued in call.collectives]
    return found


def test_a_planned_step_is_captured_whole(fake_world: World) -> None:
    job = Job(fake_world(4, names=("tp",)), Plan(((2, 2),)))
    for _ in range(3):
        job.step()
    job.end()
    (capture,) = job.sink.captures
    assert (capture.step, capture.part, capture.last_part, capture.request) == (2, 1, True, 0)
    assert (capture.dropped_records, capture.reason) == (0, "")
    assert collectives(capture) == [
        ("_c10d_functional::all_reduce", "all_reduce", "forward", "down", 1),
        ("_c10d_functional::all_reduce", "all_reduce", "backward", "up", 2),
    ]
    modules = [(depth, name) for depth, kind, name in nodes(capture) if kind == "module"]
    assert modules[:3] == [(0, "(root)"), (1, "up"), (1, "down")]
    assert {name for _, name in modules[3:]} >= {"down (backward)", "up (backward)"}
    assert job.sink.steps() == [(1, 3, ["all_reduce", "all_reduce"])]


def test_the_tree_leads_from_the_module_over_the_redistribute_to_the_collective(fake_world: World) -> None:
    job = Job(fake_world(4, names=("tp",)), Plan(((1, 1),)))
    job.step()
    job.end()
    (capture,) = job.sink.captures
    tree = nodes(capture)
    at = next(index for index, node in enumerate(tree) if node[2] == "_c10d_functional::all_reduce")
    path, depth = [], tree[at][0]
    for node in reversed(tree[:at]):
        if node[0] < depth:
            path.append(node[1:])
            depth = node[0]
    assert path == [("redistribute", "redistribute_input"), ("module", "down"), ("module", "(root)")]
    addmm = next(index for index, node in enumerate(tree) if node[1:] == ("dtensor_op", "aten::addmm"))
    assert [node[1:] for node in tree[addmm - 3 : addmm + 3]] == [
        ("op", "aten::view"),
        ("dtensor_op", "aten::t"),
        ("op", "aten::t"),
        ("dtensor_op", "aten::addmm"),
        ("op", "aten::addmm"),
        ("op", "aten::view"),
    ]
    assert [node[0] for node in tree[addmm - 3 : addmm + 3]] == [2, 2, 3, 2, 3, 2]
    redistribute = next(call for call in capture.calls if call.redistribute.trace == "P(sum)->R")
    assert not redistribute.redistribute.implicit
    issued = next(call for call in capture.calls if call.collectives)
    assert (issued.collectives[0].group.name, issued.collectives[0].group.size) == ("tp", 4)
    assert [value.WhichOneof("value") for value in issued.arguments] == ["tensor", "text", "text"]
    assert issued.arguments[2].text == "tp(size 4, stride 1)"


def test_records_name_the_users_lines(fake_world: World) -> None:
    job = Job(fake_world(4), Plan(((1, 1),)))
    job.step()
    job.end()
    (capture,) = job.sink.captures
    lines = {(line.file, line.function) for line in capture.lines}
    assert lines == {(Path(__file__).name, "forward"), (Path(__file__).name, "step")}
    in_backward = [
        capture.lines[record.line - 1].function
        for record in capture.records
        if capture.calls[record.call].name == "aten::threshold_backward"
    ]
    assert in_backward == ["forward"]  # the forward op's line, not that of `backward()`


def test_an_implicit_redistribute_names_the_argument(fake_world: World) -> None:
    mesh = fake_world(4)
    sink = MemorySink()
    errors: list[BaseException] = []
    recorder = Recorder(sink, Path(__file__).parent, errors.append, Plan(((1, 1),)))
    recorder.start()
    x = DTensor.from_local(torch.ones(1, 8), mesh, [Shard(0)], run_check=False)
    y = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)], run_check=False)
    torch.mm(x, y)
    recorder.step()
    recorder.stop()
    assert errors == []
    (capture,) = sink.captures
    decision = next(call for call in capture.calls if call.HasField("redistribute"))
    assert decision.redistribute.HasField("argument")
    assert (decision.redistribute.argument, decision.redistribute.implicit) == (1, True)
    assert (decision.redistribute.src, decision.redistribute.dst) == ("S(0)", "R")
    product = next(call for call in capture.calls if call.name == "aten::mm")
    assert kind_of(product) == "dtensor_op"
    assert (product.arguments[0].tensor.placements, list(product.arguments[0].tensor.mesh)) == ("S(0)", [4])


def test_steps_are_counted_as_the_recorder_counts_them(fake_world: World) -> None:
    job = Job(fake_world(2), Plan(((1, 1), (3, 4))))
    for _ in range(5):
        job.step()
    job.end()
    assert [capture.step for capture in job.sink.captures] == [1, 3, 4]
    trees = [nodes(capture) for capture in job.sink.captures]
    assert trees[1] == trees[2]


def test_no_tensor_s_value_leaves_the_job(fake_world: World) -> None:
    job = Job(fake_world(2), Plan(((1, 1),)))
    secret = torch.full((), 31.4159)
    assert secret.item() == pytest.approx(31.4159)
    torch.tensor([27183, 82845]).tolist()
    job.step()
    job.end()
    (capture,) = job.sink.captures
    (read,) = [call for call in capture.calls if call.name == "aten::_local_scalar_dense"]
    assert [value.text for value in read.outputs] == ["float"]
    assert not any(number in str(capture) for number in ("31.4", "27183", "82845"))


def test_what_is_asked_for_is_captured_from_the_next_step_on(fake_world: World) -> None:
    job = Job(fake_world(2), Plan())
    job.step()
    job.sink.request = (7, 2)
    for _ in range(4):
        job.step()
    job.end()
    assert [(capture.step, capture.request) for capture in job.sink.captures] == [(3, 7), (4, 7)]
    assert job.sink.counters.request == 7


def test_the_same_results_with_and_without_a_capture(fake_world: World) -> None:
    mesh = fake_world(2)
    parameters = []
    for plan in (Plan(), Plan(every=True)):
        torch.manual_seed(0)
        job = Job(mesh, plan)
        for _ in range(3):
            job.step()
        job.end()
        found: list[Any] = list(job.model.parameters())
        parameters.append([parameter.full_tensor() for parameter in found])
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))


def test_a_mode_of_the_program_is_never_taken_from_it(fake_world: World) -> None:
    """Active when the step begins: no capture. Entered within it and left behind it: ours is muted until on top."""

    class Theirs(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            type(self).seen += 1
            return NotImplemented if DTensor in types else func(*args, **(kwargs or {}))

    make: Any = Theirs
    job = Job(fake_world(2), Plan(((2, 5),)))
    with make():
        job.step()
    job.step()
    job.step()
    mode = make()
    with mode:
        job.step()
        assert Theirs.seen > 0
    before = Theirs.seen
    job.step()
    job.step()
    assert Theirs.seen == before
    job.end()
    assert [(capture.step, capture.reason) for capture in job.sink.captures] == [
        (2, "a dispatch mode of the program is active"),
        (3, ""),
        (4, ""),
        (5, "a dispatch mode of the program is active"),
    ]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_requested_capture_waits_for_a_moment_without_modes(
    fake_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturer_module, "MAX_WAIT_STEPS", 2)

    class Theirs(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return NotImplemented if DTensor in types else func(*args, **(kwargs or {}))

    make: Any = Theirs
    job = Job(fake_world(2), Plan())
    job.sink.request = (1, 1)
    with make():
        for _ in range(2):
            job.step()
    job.step()
    job.step()
    job.sink.request = (2, 1)
    with make():
        for _ in range(4):
            job.step()
    job.end()
    assert [(capture.step, capture.request, bool(capture.records)) for capture in job.sink.captures] == [
        (4, 1, True),
        (8, 2, False),
    ]
    assert job.sink.captures[1].reason == "a dispatch mode of the program is active"


def test_a_collective_of_another_thread_has_a_record_of_its_own(fake_world: World) -> None:
    fake_world(2)
    sink = MemorySink()
    errors: list[BaseException] = []
    recorder = Recorder(sink, Path(__file__).parent, errors.append, Plan(((1, 1),)))
    recorder.start()
    torch.ones(2).sin()
    thread = threading.Thread(target=torch.distributed.barrier)
    thread.start()
    thread.join()
    recorder.step()
    recorder.stop()
    (capture,) = sink.captures
    assert collectives(capture) == [("c10d::barrier", "barrier", "other", "", 0)]
    assert errors == []


def test_an_open_step_says_that_it_did_not_end(fake_world: World) -> None:
    job = Job(fake_world(2), Plan(((2, 2),)))
    job.step()
    job.model(torch.ones(4, 8))
    job.end()
    (capture,) = job.sink.captures
    assert (capture.step, capture.reason) == (2, "the process ended within this step")
    assert [issued[2] for issued in collectives(capture)] == ["forward"]


def test_parts_are_complete_and_join_to_one_tree(fake_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from commwatch.agent.capture import messages

    mesh = fake_world(2)
    trees = []
    for size in (5_000, 7):
        monkeypatch.setattr(messages, "PART_RECORDS", size)
        torch.manual_seed(0)
        job = Job(mesh, Plan(((1, 1),)))
        job.step()
        job.end()
        parts = job.sink.captures
        assert [part.part for part in parts] == list(range(1, len(parts) + 1))
        assert [part.last_part for part in parts] == [False] * (len(parts) - 1) + [True]
        trees.append([node for part in parts for node in nodes(part)])
    assert len(trees[0]) > 30
    assert trees[0] == trees[1]


def test_a_spool_without_room_drops_the_capture_and_says_so(fake_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from commwatch.agent.capture import messages

    monkeypatch.setattr(messages, "PART_RECORDS", 10)
    job = Job(fake_world(2), Plan(((1, 1),)))
    keep = job.sink.append

    def append(content: Any) -> bool:
        full = isinstance(content, records_pb2.Capture) and content.records and content.part > 2
        return False if full else keep(content)

    monkeypatch.setattr(job.sink, "append", append)
    job.step()
    job.end()
    last = job.sink.captures[-1]
    assert [capture.part for capture in job.sink.captures] == [1, 2, 3]
    assert (last.last_part, len(last.records)) == (True, 0)
    assert last.dropped_records > 10
    assert last.reason == "the spool has no room for captures (COMMWATCH_SPOOL_MAX_BYTES)"


def test_a_failure_of_the_capture_harms_neither_job_nor_recording(
    fake_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from commwatch.agent.capture.op_capture import OpCapture

    def broken(self: Any, node: Any) -> int:
        raise RuntimeError("inside")

    monkeypatch.setattr(OpCapture, "_place", broken)
    job = Job(fake_world(2), Plan(((1, 1),)))
    job.step()
    job.step()
    job.end()
    (capture,) = job.sink.captures
    assert capture.reason == "recording ended early: RuntimeError"
    assert job.sink.steps() == [(1, 2, ["all_reduce", "all_reduce"])]


def test_compiled_models_are_not_compiled_again_for_a_capture(fake_world: World) -> None:
    fake_world(2)
    frames = []
    for plan in (Plan(), Plan(((2, 2), (4, 4)))):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        errors: list[BaseException] = []
        recorder = Recorder(MemorySink(), Path(__file__).parent, errors.append, plan)
        recorder.start()
        model: Any = torch.compile(MLP(), backend=counter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.stop()
        assert errors == []
        frames.append((counter.frame_count, counter.op_count))
    assert frames[0] == frames[1]
    assert frames[0][0] == 1


def test_replicated_inputs_are_shown_with_their_mesh(fake_world: World) -> None:
    mesh = fake_world(2, 2)
    sink = MemorySink()
    recorder = Recorder(sink, Path(__file__).parent, lambda error: None, Plan(((1, 1),)))
    recorder.start()
    x = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), Shard(0)], run_check=False)
    x + x
    recorder.step()
    recorder.stop()
    call = next(call for call in sink.captures[0].calls if kind_of(call) == "dtensor_op")
    assert list(call.arguments[0].tensor.mesh) == [2, 2]
    assert call.arguments[0].tensor.placements == "RS(0)"


def test_backward_is_told_by_module_also_between_the_ranges_of_fsdp(fake_world: World) -> None:
    mesh = fake_world(2, 2, names=("dp", "tp"))
    sink = MemorySink()
    errors: list[BaseException] = []
    recorder = Recorder(sink, Path(__file__).parent, errors.append, Plan(((1, 1),)))
    blocks = [
        parallelize_module(MLP(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}) for _ in range(2)
    ]
    model: Any = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    recorder.start()
    model(torch.ones(4, 8)).sum().backward()
    recorder.step()
    recorder.stop()
    assert errors == []
    (capture,) = sink.captures
    tree = nodes(capture)
    above: dict[int, str] = {}
    products = []
    for depth, kind, name in tree:
        above = {level: module for level, module in above.items() if level < depth}
        if kind == "module":
            above[depth] = name
        if (kind, name) == ("dtensor_op", "aten::mm"):
            products.append(above[max(above)])
    assert products == [
        *("1.down (backward)", "1.down (backward)", "1.up (backward)", "1.up (backward)"),
        *("0.down (backward)", "0.down (backward)", "0.up (backward)"),
    ]


def test_a_module_s_own_hook_that_raises_leaves_no_entry_open(fake_world: World) -> None:
    fake_world(2)
    sink = MemorySink()
    recorder = Recorder(sink, Path(__file__).parent, lambda error: None, Plan(((1, 1),)))
    recorder.start()

    class Suppresses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raising, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
            self.raising.register_forward_hook(lambda *_: (_ for _ in ()).throw(ArithmeticError()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(ArithmeticError):
                self.raising(x)
            out: torch.Tensor = self.after(x)
            return out

    model: Any = nn.Sequential(Suppresses(), nn.Linear(8, 8))
    with torch.no_grad():
        model(torch.ones(2, 8))
        with contextlib.suppress(ArithmeticError):
            model[0].raising(torch.ones(2, 8))
        model[1](torch.ones(2, 8))
    recorder.step()
    recorder.stop()
    (capture,) = sink.captures
    modules = [(depth, name) for depth, kind, name in nodes(capture) if kind == "module"]
    assert modules[:2] == [(0, "(root)"), (1, "0")]
    # What ran behind the caught exception until the caller ended stands below the module whose hook raised.
    assert modules[-3:] == [(1, "1"), (0, "0.raising"), (0, "1")]
    assert recorder.observer.tracker.stack.closing == []


def test_a_recorder_that_fails_within_a_captured_step_takes_its_mode_away(
    fake_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("inside")

    mesh = fake_world(2)
    job = Job(mesh, Plan(every=True))
    monkeypatch.setattr(job.recorder.observer, "observe", broken)
    monkeypatch.setattr(job.recorder, "_on_error", lambda error: job.recorder.silence())
    assert torch._C._len_torch_dispatch_stack() == 1
    job.step()
    assert torch._C._len_torch_dispatch_stack() == 0
    job.step()
    job.recorder.stop()
    assert torch._C._len_torch_dispatch_stack() == 0
