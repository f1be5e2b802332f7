"""When a step ends, and what a recorder that fails or was forked does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import optimizer as optimizers
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule

from commwatch.agent.recorder import interpose
from commwatch.agent.recorder.recorder import Recorder
from commwatch.v1 import records_pb2
from tests.unit.agent.recorder.memory_sink import MemorySink

World = Callable[..., DeviceMesh]
ERRORS: list[BaseException] = []


@contextmanager
def recording(sink: MemorySink) -> Iterator[Recorder]:
    """A recorder whose errors fail the test."""
    ERRORS.clear()
    recorder = Recorder(sink, Path.cwd(), ERRORS.append)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()
    assert ERRORS == []


def model_of(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(MLPModule("cpu"), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})


def test_an_optimizer_ends_the_step(fake_world: World) -> None:
    model = model_of(fake_world(2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sink = MemorySink()
    with recording(sink) as recorder:
        for _ in range(3):
            model(torch.rand(4, 10, requires_grad=True)).sum().backward()
            sgd.step()
    recorder.finish()
    assert sink.steps() == [(1, 3, ["all_reduce", "all_reduce"])]
    assert (sink.counters.steps, sink.counters.calls, sink.counters.range_steps) == (3, 6, 3)


def test_a_second_optimizer_of_the_same_backward_ends_no_step(fake_world: World) -> None:
    model = model_of(fake_world(2))
    parameters = list(model.parameters())
    first, second = torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.1)
    sink = MemorySink()
    with recording(sink):
        for _ in range(2):
            model(torch.rand(4, 10, requires_grad=True)).sum().backward()
            first.step()
            second.step()
    assert sink.counters.steps == 2


def test_steps_by_hand_win_over_optimizers(fake_world: World) -> None:
    model = model_of(fake_world(2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sink = MemorySink()
    with recording(sink) as recorder:
        recorder.step()
        for _ in range(4):
            model(torch.rand(4, 10, requires_grad=True)).sum().backward()
            sgd.step()
        recorder.step()
    recorder.finish()
    assert [kinds for _, _, kinds in sink.steps()] == [[], ["all_reduce"] * 8]


def test_without_an_optimizer_each_outermost_call_without_gradients_is_a_step(fake_world: World) -> None:
    model = model_of(fake_world(2))
    sink = MemorySink()
    with recording(sink) as recorder, torch.no_grad():
        for _ in range(5):
            model(torch.rand(4, 10))
    recorder.finish()
    assert sink.steps() == [(1, 5, ["all_reduce"])]


def test_evaluation_inside_training_belongs_to_the_step(fake_world: World) -> None:
    model = model_of(fake_world(2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sink = MemorySink()
    with recording(sink) as recorder:
        for evaluate in (False, True):
            model(torch.rand(4, 10)).sum().backward()
            if evaluate:
                with torch.no_grad():
                    model(torch.rand(4, 10))
            sgd.step()
    recorder.finish()
    assert [kinds for _, _, kinds in sink.steps()] == [["all_reduce"], ["all_reduce", "all_reduce"]]
    pattern = records_pb2.Pattern.FromString(sink.definitions[sink.records[-1].pattern_hash][1])
    assert [(call.phase, call.module) for call in pattern.calls] == [("forward", "net2"), ("eval", "net2")]


def test_a_process_that_never_steps_reports_one_open_step(fake_world: World) -> None:
    fake_world(2)
    sink = MemorySink()
    with recording(sink) as recorder:
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
    recorder.finish()
    (only,) = sink.records
    assert (only.steps, only.unfinished, sink.steps()) == (0, True, [(1, 1, ["all_reduce"] * 3)])
    assert (sink.counters.steps, sink.counters.calls) == (0, 3)


def test_calls_of_a_thread_that_races_with_the_step_do_not_change_its_pattern(fake_world: World) -> None:
    fake_world(2)
    sink = MemorySink()
    with recording(sink) as recorder:
        for early in (True, False, True):
            worker = threading.Thread(target=lambda: dist.barrier())
            if early:
                worker.start()
                worker.join()
            dist.all_reduce(torch.ones(1))
            if not early:
                worker.start()
                worker.join()
            recorder.step()
    recorder.finish()
    assert sink.steps() == [(1, 3, ["all_reduce", "barrier"])]


def test_facts_name_mesh_device_backend_and_modules(fake_world: World) -> None:
    mesh = fake_world(2, 4, names=("dp", "tp"))
    sink = MemorySink()
    ERRORS.clear()
    recorder = Recorder(sink, Path.cwd(), ERRORS.append)
    recorder.observer.groups.learn_mesh(mesh)
    recorder.start()
    model = nn.Sequential(model_of(mesh["tp"]), model_of(mesh["tp"]))
    model(torch.rand(4, 10))
    recorder.step()
    recorder.stop()
    dist.destroy_process_group()
    recorder.finish()
    (facts,) = sink.facts
    assert [(dimension.name, dimension.size) for dimension in facts.mesh] == [("dp", 2), ("tp", 4)]
    assert (facts.device_type, facts.backend, facts.compile_mode) == ("cpu", "fake", "eager")
    modules = records_pb2.Modules.FromString(sink.definitions[facts.modules_hash][1])
    assert [(entry.module, entry.count) for entry in modules.modules] == [
        ("(root)", 1),
        ("*", 2),
        ("*.net1", 2),
        ("*.net2", 2),
        ("*.relu", 2),
    ]


def test_an_error_switches_recording_off_once(fake_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_world(2)
    ERRORS.clear()
    recorder = Recorder(MemorySink(), Path.cwd(), ERRORS.append)
    recorder.start()
    monkeypatch.setattr(recorder.observer, "observe", None)
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    recorder.stop()
    assert [type(error) for error in ERRORS] == [TypeError]


def test_nothing_of_a_recorder_is_left_after_stop(fake_world: World) -> None:
    fake_world(2)
    hooks = dict(optimizers._global_optimizer_post_hooks)
    with recording(MemorySink()):
        assert interpose.installed()
    assert not interpose.installed()
    assert dict(optimizers._global_optimizer_post_hooks) == hooks


def test_a_forked_child_records_nothing(fake_world: World) -> None:
    fake_world(2)
    sink = MemorySink()
    with recording(sink) as recorder:
        dist.all_reduce(torch.ones(1))
        child = os.fork()
        if child == 0:
            dist.all_reduce(torch.ones(1))
            os._exit(len(recorder._calls))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1  # the call before the fork, and no other
        recorder.step()
    assert sink.counters.calls == 1


def test_a_time_limit_of_the_program_that_strikes_in_the_recorder_reaches_the_program(
    fake_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(2)

    def time_is_up(number: int, frame: object) -> None:
        raise TimeoutError("the program's own limit")

    before = signal.signal(signal.SIGALRM, time_is_up)
    ERRORS.clear()
    recorder = Recorder(MemorySink(), Path.cwd(), ERRORS.append)
    recorder.start()
    try:
        monkeypatch.setattr(recorder.observer, "observe", lambda op, args: signal.raise_signal(signal.SIGALRM))
        with pytest.raises(TimeoutError, match="the program's own limit"):
            dist.all_reduce(torch.ones(1))
    finally:
        recorder.stop()
        signal.signal(signal.SIGALRM, before)
    assert ERRORS == []


def test_a_recorder_that_failed_reports_no_further_step(fake_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_world(2)
    sink = MemorySink()
    recorder = Recorder(sink, Path.cwd(), lambda error: recorder.silence())
    recorder.start()
    dist.all_reduce(torch.ones(1))
    recorder.step()
    monkeypatch.setattr(recorder.observer, "observe", None)
    dist.all_reduce(torch.ones(1))
    recorder.step()
    assert interpose.installed()  # taking a kernel away from inside itself is not safe
    recorder.stop()
    assert not interpose.installed()
    assert sink.counters.steps == 1


def test_a_rank_counts_what_it_verified_and_what_it_cost(fake_world: World) -> None:
    model = model_of(fake_world(2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sink = MemorySink()
    with recording(sink) as recorder:
        for _ in range(3):
            model(torch.rand(4, 10, requires_grad=True)).sum().backward()
            sgd.step()
        finished = sink.counters
        dist.all_reduce(torch.ones(1))
    recorder.finish()
    counters = sink.counters
    assert (finished.calls, finished.expected_calls, finished.unverified_calls) == (6, 0, 6)
    assert (counters.calls, counters.expected_calls, counters.unverified_calls) == (7, 0, 7)
    assert counters.unattributed_calls == 0
    assert 0 < counters.recording_ns < counters.elapsed_ns
    assert (counters.recording_ns, counters.elapsed_ns) == (finished.recording_ns, finished.elapsed_ns)
    first, last = sink.completeness[0], sink.completeness[-1]
    assert [(found.group.name, found.recorded, found.source) for found in first.groups] == [("default_pg", 2, "")]
    assert [(found.group.name, found.recorded, found.source) for found in last.groups] == [("default_pg", 7, "")]
    assert (last.step, last.unattributed, last.unequal_steps) == (3, 0, 0)


def test_a_collective_of_a_loss_outside_of_modules_is_counted_as_without_a_module(fake_world: World) -> None:
    fake_world(2)
    sink = MemorySink()
    with recording(sink) as recorder:
        x = torch.ones(2, requires_grad=True)
        functional.all_gather_tensor_autograd(x, 0, [0, 1]).sum().backward()
        recorder.step()
    assert (sink.counters.calls, sink.counters.unattributed_calls) == (2, 1)  # forward of no module is phase other
