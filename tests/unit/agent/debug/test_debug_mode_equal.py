"""``debug_string()`` of ours and of torch's, character for character, on the same programs in one process.

torch 2.13 is the measure: on another torch the texts are compared too, and a difference is one of that release.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._debug_mode import DebugMode as TorchDebugMode

from commwatch.agent.debug import DebugMode
from tests.unit.agent.debug import programs

World = Callable[..., DeviceMesh]

LOCAL = (
    programs.linear,
    programs.modules,
    programs.optimizer_step,
    programs.indexing_and_outputs,
    programs.fake_tensors,
    programs.fake_linear_backward,
    programs.record_functions,
    programs.checkpointed,
    programs.checkpointed_reentrant,
    programs.autograd_function,
    programs.caught_exception,
    programs.compiled,
)
ON_EIGHT = (
    programs.mm,
    programs.mm_backward,
    programs.add_sharded_apart,
    programs.redistributes,
    programs.functional_collectives,
    programs.plain_collectives,
    programs.mlp_tensor_parallel,
    programs.sequence_parallel,
    programs.fsdp2,
    programs.loss_parallel_step,
)
ON_FOUR_BY_TWO = (programs.einsum, programs.redistribute_two_dimensions)
FLAGS: tuple[dict[str, Any], ...] = (
    {},
    {"record_torchfunction": True, "record_ids": True},
    {"record_nn_module": True, "store_original_args": True},
    {"record_faketensor": True, "record_output": False, "record_profiler_context": False},
)
IDS = ("default", "functions-ids", "modules-original-args", "fake-no-output")

# Where torch's mode records itself, or cannot work, and ours does not follow: see the tests of what is right instead.
WITHOUT_FUNCTIONS = {
    programs.compiled: "torch's mode is not compatible with torch.compile when it records functions",
    programs.fsdp2: "torch's mode prints every byte of every storage",
    programs.plain_collectives: "torch's mode prints every byte of every storage",
}
WITHOUT_MODULES = dict.fromkeys(
    (programs.checkpointed, programs.checkpointed_reentrant, programs.mlp_tensor_parallel, programs.sequence_parallel),
    "torch's module tracker runs a view of each leaf that is a module's input, and records it",
)


def cases(of: tuple[Any, ...]) -> list[Any]:
    """Every program with every set of flags, without the exceptions above."""
    return [
        pytest.param(program, flags, id=f"{program.__name__}-{name}")
        for program in of
        for flags, name in zip(FLAGS, IDS, strict=True)
        if not (flags.get("record_torchfunction") and program in WITHOUT_FUNCTIONS)
        and not (flags.get("record_nn_module") and program in WITHOUT_MODULES)
    ]


def text_of(mode: type[Any], build: Callable[[], programs.Program], flags: dict[str, Any]) -> str:
    torch.manual_seed(0)
    run = build()
    with mode(**flags) as recorded:
        run()
    text: str = recorded.debug_string()
    return text


OWN_READS = r"( *<method-wrapper '__get__' of getset_descriptor object at 0x[0-9a-f]+>\(t[^\n]*\n){4}"


def without_own_reads(text: str) -> str:
    """torch's mode reads element type and shape of a redistribute's tensor, twice, and records that as functions."""
    return re.sub(OWN_READS + r"(?= *redistribute_input(?: \[explicit\] )?\(t)", "", text)


def assert_equal(build: Callable[[], programs.Program], flags: dict[str, Any]) -> None:
    theirs = text_of(TorchDebugMode, build, flags)
    if flags.get("record_torchfunction"):
        theirs = without_own_reads(theirs)
    assert theirs
    assert text_of(DebugMode, build, flags).splitlines() == theirs.splitlines()


@pytest.mark.parametrize(("program", "flags"), cases(LOCAL))
def test_programs_without_ranks(program: Callable[[], programs.Program], flags: dict[str, Any]) -> None:
    if program in (programs.fake_tensors, programs.fake_linear_backward):
        flags = {**flags, "record_faketensor": True}
    assert_equal(program, flags)


@pytest.mark.parametrize(("program", "flags"), cases(ON_EIGHT))
def test_programs_on_eight_ranks(
    program: Callable[[DeviceMesh], programs.Program], flags: dict[str, Any], fake_world: World
) -> None:
    mesh = fake_world(8)
    assert_equal(lambda: program(mesh), flags)


@pytest.mark.parametrize(("program", "flags"), cases(ON_FOUR_BY_TWO))
def test_programs_on_a_mesh_of_two_dimensions(
    program: Callable[[DeviceMesh], programs.Program], flags: dict[str, Any], fake_world: World
) -> None:
    mesh = fake_world(4, 2)
    assert_equal(lambda: program(mesh), flags)


@pytest.mark.parametrize("flags", FLAGS, ids=IDS)
def test_a_tensor_parallel_transformer(flags: dict[str, Any], fake_world: World) -> None:
    mesh = fake_world(4)
    assert_equal(lambda: programs.transformer_tensor_parallel(mesh), flags)
