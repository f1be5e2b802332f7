"""Collectives that are captured into a CUDA graph. Whether a capture is under way is said here instead of by CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from commwatch.agent import record
from commwatch.agent.recorder import features, torch_private
from commwatch.agent.recorder.ranges import Content
from commwatch.agent.recorder.recorder import Recorder
from commwatch.v1 import records_pb2
from tests.unit.agent.recorder.memory_sink import MemorySink

World = Callable[..., DeviceMesh]


class Stream:
    """Stands for the current CUDA stream."""

    def __init__(self) -> None:
        self.capturing = False

    @contextmanager
    def capture(self) -> Iterator[None]:
        """What is issued meanwhile is captured."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    found = Stream()
    monkeypatch.setattr(torch_private, "enters_graph", lambda tensor: found.capturing)
    return found


@contextmanager
def recording(sink: MemorySink) -> Iterator[Recorder]:
    def failed(error: BaseException) -> None:
        raise error

    recorder = Recorder(sink, Path(__file__).parent, failed)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()


class Reducing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x


def told(sink: MemorySink) -> list[tuple[int, int]]:
    """(step, captured collectives) of every message about completeness."""
    return [(message.step, message.graph_calls) for message in sink.completeness]


def test_a_captured_collective_is_counted_and_keeps_its_place_in_the_step(fake_world: World, stream: Stream) -> None:
    fake_world(2)
    module, sink = Reducing(), MemorySink()
    with recording(sink) as recorder:
        dist.barrier()
        with stream.capture():
            module(torch.ones(2))
            dist.broadcast(torch.ones(2), 0)
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
        recorder.step()
        recorder.step()
    recorder.finish()
    assert sink.steps() == [(1, 1, ["barrier", "all_reduce", "broadcast", "all_gather"]), (2, 2, [])]
    pattern = records_pb2.Pattern.FromString(sink.definitions[sink.newest()[1].pattern_hash][1])
    assert [call.module for call in pattern.calls] == ["", "(root)", "", ""]
    assert sink.completeness[-1].graph_calls == 2
    assert [found.recorded for found in sink.completeness[-1].groups] == [4]


def test_a_graph_without_collectives_does_not_matter(fake_world: World, stream: Stream) -> None:
    fake_world(2)
    sink = MemorySink()
    with recording(sink) as recorder, record() as r:
        with stream.capture():
            torch.ones(2).add_(1)
        dist.all_reduce(torch.ones(2))
        recorder.step()
    recorder.finish()
    assert told(sink) == [(1, 0), (1, 0)]
    assert r.graph_calls == 0


def test_the_first_captured_collective_is_told_before_any_step_that_replays_it(
    fake_world: World, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(2)
    sink = MemorySink()
    with recording(sink) as recorder:
        monkeypatch.setattr(recorder.completeness, "_clock", lambda: 5.0)  # no second passes
        order: list[str] = []
        append = sink.append

        def noted(content: Content) -> bool:
            order.append(content.DESCRIPTOR.name)
            return append(content)

        monkeypatch.setattr(sink, "append", noted)
        for captures in (0, 2, 0, 1):
            dist.all_reduce(torch.ones(2))
            with stream.capture():
                for _ in range(captures):
                    dist.all_reduce(torch.ones(2))
            recorder.step()
        # What is more in a later step may wait for its second.
        assert told(sink) == [(1, 0), (2, 2)]
        assert [name for name in order if name != "Facts"][:4] == ["Completeness", "StepRange"] * 2
    recorder.finish()
    assert told(sink)[2:] == [(4, 3)]


def test_a_barrier_is_asked_about_by_the_tensor_it_waits_with(
    fake_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(2)
    asked: list[torch.device] = []

    def enters_graph(tensor: torch.Tensor) -> bool:
        asked.append(tensor.device)
        return True

    monkeypatch.setattr(torch_private, "enters_graph", enters_graph)
    with record() as r:
        dist.barrier()
    assert (asked, r.graph_calls) == ([torch.device("cpu")], 1)


def test_record_tells_that_replays_are_not_observable(fake_world: World, stream: Stream) -> None:
    fake_world(2)
    with record() as r:
        with stream.capture():
            dist.all_reduce(torch.ones(2))
        assert r.graph_calls == 1
        assert str(r).splitlines()[-2:] == [
            "1 collectives",
            "replays of CUDA graphs are not observable: 1 collective was captured",
        ]
        with stream.capture():
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2))
    assert r.graph_calls == 3
    assert str(r).splitlines()[-1] == "replays of CUDA graphs are not observable: 3 collectives were captured"
    assert r.counts() == {"all_reduce": 3}


def test_tensors_elsewhere_never_ask_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "stream_captures", None)
    monkeypatch.setattr(torch.cuda, "current_device", None)
    assert torch_private.enters_graph(torch.ones(1)) is False


@pytest.mark.parametrize(("current", "switched"), [(1, []), (0, [1])])
def test_the_stream_is_that_of_the_tensor_s_device(
    monkeypatch: pytest.MonkeyPatch, current: int, switched: list[int]
) -> None:
    entered: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        yield

    with FakeTensorMode(allow_non_fake_inputs=True):
        tensor = torch.empty(1, device="cuda:1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    for capturing in (True, False):
        monkeypatch.setattr(torch_private, "stream_captures", lambda: capturing)  # noqa: B023  called in this turn
        assert torch_private.enters_graph(tensor) is capturing
    assert entered == switched * 2


def test_a_torch_that_cannot_tell_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.cuda.is_current_stream_capturing"
    assert torch_private.lacks([name]) == []
    monkeypatch.delattr(torch.cuda, "is_current_stream_capturing")
    assert torch_private.lacks([name]) == [name]
    assert "a collective in a CUDA graph looks like one that ran once" in features.reduced_text()
