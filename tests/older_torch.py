"""What torch 2.9 cannot run of the tests, and where the agent is known to do less on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_release import RELEASE

_HERE = Path(__file__).parent

NO_DEBUG_MODE = (
    "torch 2.9 has no DebugMode, which captures stand on",
    (
        "unit/agent/capture/test_capturer.py",
        "unit/agent/capture/test_op_hashes.py",
        "unit/agent/capture/test_op_messages.py",
        "unit/agent/capture/test_op_tree.py",
        "unit/agent/debug/test_debug_mode.py",
        "unit/agent/debug/test_debug_mode_equal.py",
        "unit/agent/debug/test_op_kinds.py",
        "unit/agent/debug/test_op_totality.py",
    ),
)
"""Files, most of which cannot be imported there."""

IMPOSSIBLE = {
    "torch 2.9 has no backward of functional all_reduce": (
        "unit/agent/debug/test_comm_compile.py::test_collectives_of_a_region_are_counted",
        "unit/agent/debug/test_comm_compile.py::test_a_region_inside_a_model_belongs_to_its_module",
        "unit/agent/debug/test_comm_compile.py::test_entering_after_compilation_compiles_nothing_anew",
        "unit/agent/debug/test_comm_right.py::test_a_module_called_twice_in_the_same_parent",
        "unit/agent/debug/test_comm_right.py::test_a_pipeline_schedule_calls_its_stage_once_for_each_micro_batch",
        "unit/agent/debug/test_comm_right.py::test_activation_checkpointing",
        "unit/agent/debug/test_comm_right.py::test_backward_of_a_checkpointed_forward_is_no_checkpointing",
        "unit/agent/debug/test_comm_right.py::test_the_optimizer_is_no_module",
        "unit/agent/debug/test_comm_right.py::test_double_backward",
        "unit/agent/debug/test_comm_right.py::test_gradients_of_a_forward_on_another_thread",
        "unit/agent/debug/test_comm_surface.py::test_backward_of_a_forward_before_the_mode_belongs_to_global",
        "unit/agent/debug/test_comm_surface.py::test_a_module_without_a_forward_in_the_mode_is_run_again_in_backward",
        "unit/agent/debug/test_comm_surface.py::test_simulated_ranks_are_counted_and_traced_ones_are_not",
        "unit/agent/debug/test_comm_surface.py::test_no_tensor_and_no_module_is_kept",
        "unit/agent/debug/test_comm_surface.py::test_what_fails_inside_does_not_reach_the_job",
    ),
    "torch 2.9 has no DebugMode, which captures stand on": ("integration/test_captured_jobs.py",),
    "pipelines of torch 2.9 abort on gloo, without commwatch too": (
        "integration/test_attributed_jobs.py",
        "integration/test_comm_debug_mode.py::test_pipeline_schedules_survive_and_are_counted",
        "integration/test_main_job.py::test_a_pipeline_that_never_steps_is_one_open_step",
        "integration/test_record_on_gloo.py::test_gpipe_sends_and_receives_and_survives",
    ),
    "gloo has no all_to_all of lists in torch 2.9": (
        "integration/test_record_on_gloo.py::test_gloo_s_own_numbers_confirm_every_kind_and_show_a_call_that_passed_by",
    ),
    "torch 2.9 fails in the backward of a functional all_gather whose gradient is not contiguous": (
        "unit/agent/recorder/test_compiled_regions.py::test_modules_and_lines[each_layer",
        "unit/agent/recorder/test_recorder.py::test_a_collective_of_a_loss_outside_of_modules_is_counted_as_without_a_module",
        "unit/agent/recorder/test_selftest.py::test_without_numbers_of_nodes_backward_has_no_module_and_the_rest_has",
    ),
    "the fake process group of torch 2.9 leaves results uninitialized, so that two runs differ": (
        "unit/agent/recorder/test_totality.py::test_a_raising_function_leaves_the_job_as_it_was",
    ),
    "a mesh of torch 2.9 names the groups of later worlds, and other tests leave some": (
        "unit/agent/recorder/test_record.py::test_groups_without_a_mesh_are_known_by_description_size_and_stride",
    ),
}

KNOWN_DIFFERENCES = {
    "torch 2.9's tables have other lines of FSDP's own ops, and headings with nothing below them": (
        "unit/agent/debug/test_comm_equal.py::test_equal_to_torch[trio_backward]",
        "unit/agent/debug/test_comm_equal.py::test_equal_to_torch[fsdp2]",
    ),
    "torch 2.9 compiles a region anew below a dispatch mode": (
        "unit/agent/debug/test_comm_compile.py::test_the_compiler_does_the_same_with_and_without",
    ),
    "torch 2.9 runs regions of aot_eager node by node, and names a function's modules after their class": (
        "unit/agent/recorder/test_compiled_regions.py::test_modules_and_lines[whole-backward0-aot_eager]",
        "unit/agent/recorder/test_compiled_regions.py::test_modules_and_lines[a_function",
        "unit/agent/recorder/test_compiled_regions.py::test_tensor_parallel_styles_in_a_region",
    ),
}
"""As ``docs/compatibility.md`` says; a test among these that passes fails the run."""


class Skipped(pytest.Module):
    """A file that is not imported."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(NO_DEBUG_MODE[0], allow_module_level=True)


def skips_file(path: Path) -> bool:
    """Whether a file of tests is skipped as a whole on the torch at hand."""
    return RELEASE < (2, 10) and path.is_relative_to(_HERE) and path.relative_to(_HERE).as_posix() in NO_DEBUG_MODE[1]


def mark(item: pytest.Item) -> None:
    """Say of a test what is so on the torch at hand."""
    if RELEASE >= (2, 10):
        return
    name = item.nodeid.removeprefix("tests/")
    for reason, names in IMPOSSIBLE.items():
        if name.startswith(names):
            item.add_marker(pytest.mark.skip(reason=reason))
    for reason, names in KNOWN_DIFFERENCES.items():
        if name.startswith(names):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
