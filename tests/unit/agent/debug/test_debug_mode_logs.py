"""Logs in a file, which torch 2.14 brought: ours are written and read as torch's own."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from commwatch.agent.debug import DebugMode
from commwatch.agent.debug import torch_private as private
from tests.unit.agent.debug import programs

World = Callable[..., DeviceMesh]
Torchs: Any = private.TorchDebugMode

pytestmark = pytest.mark.skipif(
    not hasattr(Torchs, "save_logs"), reason="torch 2.14 was the first with DebugMode.save_logs"
)


def logged(kind: Any, program: Any, mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    run = program(mesh)
    with kind() as mode, kind.log_tensor_hashes(hash_fn=["norm"]):
        run()
    return mode


def saved(logs: Any) -> str:
    file = io.StringIO()
    DebugMode.save_logs(logs, file)
    return file.getvalue()


@pytest.mark.parametrize(
    "program", [programs.mm, programs.redistributes, programs.mlp_tensor_parallel], ids=lambda program: program.__name__
)
def test_logs_are_saved_as_torchs_and_read_back(fake_world: World, program: Any) -> None:
    mesh = fake_world(8)
    program(mesh)()  # DTensor's first call of an op runs ops of its own
    ours, theirs = logged(DebugMode, program, mesh), logged(Torchs, program, mesh)
    assert len(ours.logs) > 3
    for one, other in zip(json.loads(saved(ours.logs))["logs"], json.loads(saved(theirs.logs))["logs"], strict=True):
        assert one == other
    read = DebugMode.load_logs(io.StringIO(saved(ours.logs)))
    assert [call.render([]) for call in read] == [call.render([]) for call in ours.logs]
    again = DebugMode.load_logs(io.StringIO(saved(theirs.logs)))
    assert DebugMode.check_hash_mismatches(read, again) == []
