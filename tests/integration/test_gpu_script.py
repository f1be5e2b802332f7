"""The script for a GPU where there is none: what it says, its checks on the CPU, and what it expects of graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from commwatch.agent.recorder import torch_private
from tests.gpu import check
from tests.integration.ranks import rank_environment

SCRIPT = Path(check.__file__)
CPU = torch.device("cpu")


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=rank_environment({"CUDA_VISIBLE_DEVICES": ""}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_a_gpu_it_says_that_nothing_was_checked() -> None:
    done = run_script()
    message = "nothing was checked: there is no GPU (--cpu checks on gloo what needs none)\n"
    assert (done.returncode, done.stdout) == (0, message)


def test_on_the_cpu_every_check_but_those_of_graphs_passes() -> None:
    done = run_script("--cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "failed "))]
    assert [line.split(":")[0].split() for line in lines] == [
        ["ok", name] for name in ("interposition", "compiled_region", "backward_thread", "captured_step", "fsdp2")
    ]


def test_a_check_that_finds_something_else_fails_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(_device: torch.device) -> str:
        check.expect("counts", {"all_reduce": 2}, {"all_reduce": 1})
        return "never"

    monkeypatch.setattr(check, "CHECKS", (wrong, lambda _device: "as it must be"))
    monkeypatch.setattr(check, "fsdp2", lambda _device: "as it must be")
    assert check.main(["--cpu"]) == 1
    _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "failed  wrong: AssertionError: counts: {'all_reduce': 2}, not {'all_reduce': 1}"
    assert second.startswith("ok ")


class Graph:
    """Stands for a CUDA graph: what is captured is run once, and its replays double the tensor as the graph would."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None

    def replay(self) -> None:
        assert self.tensor is not None
        self.tensor.mul_(2)

    def reset(self) -> None:
        self.tensor = None


@pytest.mark.parametrize("observed", [True, False])
def test_what_it_expects_of_a_graph_is_what_is_recorded_of_a_capture(
    monkeypatch: pytest.MonkeyPatch, observed: bool
) -> None:
    capturing: list[Graph] = []

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        capturing.append(graph)
        try:
            yield
        finally:
            capturing.clear()

    def enters_graph(tensor: torch.Tensor) -> bool:
        for graph in capturing:
            if graph.tensor is None:
                graph.tensor = tensor.div_(2)  # the capture itself changes nothing
        return bool(capturing) and observed

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch_private, "enters_graph", enters_graph)
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        if observed:
            assert check.cuda_graph(CPU) == "1 collective captured, 3 replays told as not observable"
        else:
            with pytest.raises(AssertionError, match=r"record\(\): \({'all_reduce': 2}, 0\), not"):
                check.cuda_graph(CPU)
        # Nothing is captured on the CPU, and then every run is seen.
        assert check.graph_trees(CPU) == "6 of 6 runs seen, 0 captured"
    finally:
        dist.destroy_process_group()
