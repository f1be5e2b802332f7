"""Ours and torch's CommDebugMode on the same programs, live: equal wherever torch's is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode

from commwatch.agent.debug import CommDebugMode
from tests.unit.agent.debug import comm_programs as programs
from tests.unit.agent.debug.comm_programs import QuietTorchCommDebugMode, World, c10d, functional

pytestmark = pytest.mark.filterwarnings("ignore")

PROGRAMS = [
    programs.trio,
    programs.trio_backward,
    programs.plain,
    programs.redistributes,
    programs.mlp,
    programs.mlp_with_input_grad,
    programs.sequence_parallel,
    programs.sequence_parallel_with_input_grad,
    programs.stacked,
    programs.two_models,
    programs.inference,
    programs.dropout,
    programs.fake,
    programs.transformer,
    programs.transformer_sequence_parallel,
    programs.fsdp2,
]
NOISE_LEVELS = range(4)


def run(mode: Any, make: Any, mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    program = make(mesh)
    with mode:
        program()
    return mode


def dump(mode: Any, folder: Path, noise_level: int) -> Any:
    file = folder / "dump.json"
    mode.generate_json_dump(str(file), noise_level)
    return json.loads(file.read_text())


def logged(mode: Any, folder: Path, noise_level: int) -> str:
    file = folder / "table.txt"
    mode.log_comm_debug_tracing_table_to_file(str(file), noise_level)
    return file.read_text()


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_equal_to_torch(fake_world: World, tmp_path: Path, make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = fake_world(4)
    make(mesh)()  # DTensor's first call of an op runs ops of its own
    theirs, ours = run(QuietTorchCommDebugMode(), make, mesh), run(CommDebugMode(), make, mesh)
    assert ours.get_total_counts() == theirs.get_total_counts() > 0
    assert ours.get_comm_counts() == theirs.get_comm_counts()
    assert ours.comm_module_counts == theirs.comm_module_counts
    assert list(ours.get_sharding_info().items()) == list(theirs.get_sharding_info().items())
    if "object at" not in repr(theirs):  # torch 2.9 has no text of its own
        assert repr(ours) == repr(theirs)
    listed = [[(name, list(found)) for name, found in mode.get_parameter_info().items()] for mode in (ours, theirs)]
    assert listed[0] == listed[1]
    one, other = ours.advanced_module_tracker, theirs.advanced_module_tracker
    assert one.module_parents_dict == other.module_parents_dict
    assert one.parent_dict == other.parent_dict
    assert one.module_helper_dict == other.module_helper_dict
    assert one.name == "Global"
    for noise_level in NOISE_LEVELS:
        table = ours.generate_comm_debug_tracing_table(noise_level)
        assert table == theirs.generate_comm_debug_tracing_table(noise_level)
        assert dump(ours, tmp_path, noise_level) == dump(theirs, tmp_path, noise_level)
        assert logged(ours, tmp_path, noise_level) == logged(theirs, tmp_path, noise_level)
    printed = []
    for tracker in (one, other):
        tracker.print_sharding_info()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


@pytest.mark.parametrize("make", [programs.mlp, programs.sequence_parallel], ids=lambda make: make.__name__)
def test_equal_to_torch_as_it_comes_below_level_3(fake_world: World, tmp_path: Path, make: Any) -> None:
    mesh = fake_world(4)
    theirs, ours = run(TorchCommDebugMode(), make, mesh), run(CommDebugMode(), make, mesh)
    for noise_level in NOISE_LEVELS[:3]:
        table = ours.generate_comm_debug_tracing_table(noise_level)
        assert table == theirs.generate_comm_debug_tracing_table(noise_level)
        assert dump(ours, tmp_path, noise_level) == dump(theirs, tmp_path, noise_level)
    assert len(ours.generate_comm_debug_tracing_table()) < len(theirs.generate_comm_debug_tracing_table())


@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (
            programs.trio,
            {functional.all_gather_into_tensor: 1, functional.reduce_scatter_tensor: 1, functional.all_reduce: 1},
        ),
        (programs.mlp, {functional.all_reduce: 1}),
        (programs.mlp_with_input_grad, {functional.all_reduce: 2}),
        (programs.sequence_parallel, {functional.all_gather_into_tensor: 2, functional.reduce_scatter_tensor: 1}),
        (
            programs.sequence_parallel_with_input_grad,
            {functional.all_gather_into_tensor: 2, functional.reduce_scatter_tensor: 2},
        ),
        (programs.transformer, {functional.all_reduce: 6, functional.all_gather_into_tensor: 1}),
        (programs.fsdp2, {c10d._allgather_base_: 3}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_known_answers(fake_world: World, make: Any, counts: dict[Any, int]) -> None:
    assert run(CommDebugMode(), make, fake_world(4)).get_comm_counts() == counts


def test_transformer_backward_has_torchs_counts_for_every_module(fake_world: World) -> None:
    mesh = fake_world(4)
    theirs = run(TorchCommDebugMode(), programs.transformer_backward, mesh)
    ours = run(CommDebugMode(), programs.transformer_backward, mesh)
    assert ours.comm_module_counts == theirs.comm_module_counts
    assert ours.comm_module_counts["Global"]["backward"] == {functional.all_reduce: 9}
