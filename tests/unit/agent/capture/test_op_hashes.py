"""Hashes of outputs: torch's, of nothing that is in flight, and without a trace in what the job computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._debug_mode import DebugMode as TorchDebugMode

from commwatch.agent.capture.hashes import KINDS
from commwatch.agent.capture.messages import Encoder
from commwatch.agent.capture.op_capture import OpCapture
from commwatch.agent.capture.plan import Plan
from commwatch.agent.recorder.observer import Observer
from commwatch.agent.settings import HASHES
from commwatch.v1 import records_pb2
from tests.unit.agent.capture.test_capturer import Job
from tests.unit.agent.debug import programs

World = Callable[..., DeviceMesh]
RANK = Path(__file__).with_name("hashing_rank.py")


def hashes_of(run: Callable[[], Any], kind: str) -> list[tuple[str, str]]:
    """(name, hash) of each record."""
    observer = Observer(Path(__file__).parent)
    with OpCapture(observer, hashes=kind) as mode:
        run()
    assert mode.failure is None
    part = parts_of(mode, observer)
    return [(part.calls[record.call].name, record.output_hash) for record in part.records]


def parts_of(mode: OpCapture, observer: Observer) -> records_pb2.Capture:
    (part,) = Encoder(mode.operators, mode.collectives, observer.identities, mode.places.lines).parts()
    return part


def test_the_setting_knows_every_kind() -> None:
    assert HASHES == KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "program",
    [programs.modules, programs.optimizer_step, programs.autograd_function],
    ids=lambda program: program.__name__,
)
def test_hashes_are_those_of_torch_s_mode(program: Callable[[], programs.Program], kind: str) -> None:
    torch.manual_seed(0)
    run = program()
    with TorchDebugMode() as theirs, TorchDebugMode.log_tensor_hashes(hash_fn=kind):
        run()
    torch.manual_seed(0)
    found = hashes_of(program(), kind)
    expected = [(call.op.__qualname__, call.log.get("hash")) for call in theirs.operators if hasattr(call, "op")]
    ours = [(name, text) for name, text in found if "::" in name]
    assert [name for name, _ in ours] == [name for name, _ in expected]
    for (name, text), (_, value) in zip(ours, expected, strict=True):
        values = list(value) if isinstance(value, (list, tuple)) else value
        whole = (
            None if values is None or (isinstance(values, list) and all(item is None for item in values)) else values
        )
        assert text == ("" if whole is None else str(whole)), name
    assert sum(bool(text) for _, text in ours) > len(ours) // 2


def test_nothing_is_hashed_unless_it_is_asked_for() -> None:
    assert {text for _, text in hashes_of(programs.linear(), "")} == {""}


def test_what_has_no_value_to_hash_is_left_out() -> None:
    def run() -> None:
        torch.empty(3)
        torch.ones(2, device="meta").sin()
        torch.eye(2).to_sparse()
        torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8)
        torch.ones(3).sum().item()

    found = dict(hashes_of(run, "norm"))
    assert found["aten::empty.memory_format"] == found["aten::_local_scalar_dense"] == ""
    assert found["aten::quantize_per_tensor"] == found["aten::sin"] == ""
    assert found["aten::sum"] == "3.0"


def test_many_hashes_are_one() -> None:
    tensors = [torch.full((2,), float(index)) for index in range(100)]
    ((_, text),) = hashes_of(lambda: torch._foreach_add(tensors, 1), "norm")
    assert text.startswith("blake2b:")
    assert len(text) == 40
    tensors[50] += 1
    assert hashes_of(lambda: torch._foreach_add(tensors, 1), "norm") != [("aten::_foreach_add.Scalar", text)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_computes_the_same_with_hashes(kind: str, fake_world: World) -> None:
    mesh = fake_world(2)
    parameters, hashes = [], []
    for plan in (Plan(), Plan(every=True, hashes=kind), Plan(every=True, hashes=kind)):
        torch.manual_seed(0)
        job = Job(mesh, plan)
        for _ in range(2):
            job.step()
        job.end()
        found: list[Any] = list(job.model.parameters())
        parameters.append([parameter.full_tensor() for parameter in found])
        hashes.append([record.output_hash for capture in job.sink.captures for record in capture.records])
    assert all(torch.equal(a, b) for a, b in zip(parameters[0], parameters[1], strict=True))
    assert hashes[0] == []
    assert hashes[1] == hashes[2]
    assert len(set(hashes[1])) > 15


def run_ranks(folder: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(folder / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def test_ranks_that_hash_wait_for_nobody_and_compute_the_same(tmp_path: Path) -> None:
    totals = {"norm": "36.0", "hash_tensor": str(hash_of_the_sum())}
    ranks = run_ranks(tmp_path)
    assert ranks[0][""]["results"][0] == [5.0, 5.0, 5.0]
    for found in ranks:
        plain = found[""]
        assert not any(text for _, text in plain["hashes"])
        for kind in KINDS:
            hashed = found[kind]
            assert hashed["failure"] == "None"
            assert hashed["results"] == plain["results"]
            assert texts(hashed, "_c10d_functional::all_reduce") == [""]
            assert texts(hashed, "_c10d_functional::wait_tensor") == [totals[kind]]
    for kind in KINDS:
        first, *in_flight, last = texts(ranks[0][kind], "aten::view")
        assert first
        assert last
        assert in_flight == ["", "", ""]  # of what is received, of both sums


def texts(found: dict[str, Any], op: str) -> list[str]:
    return [text for name, text in found["hashes"] if name == op]


def hash_of_the_sum() -> int:
    total = 2 * torch.arange(6.0).view(2, 3) + 1
    return int(torch.hash_tensor(total.double()).item())
