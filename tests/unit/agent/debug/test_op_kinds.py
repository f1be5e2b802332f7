"""Rarer kinds of records: the text is torch's, character for character, and kinds and structure are right."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as module_hooks
from torch.profiler import record_function
from torch.utils._debug_mode import DebugMode as TorchDebugMode
from torch.utils._debug_mode import get_active_debug_mode

from commwatch.agent.debug import DebugMode
from tests.unit.agent.debug import programs
from tests.unit.agent.debug import rare_programs as rare
from tests.unit.agent.debug.programs import Program
from tests.unit.agent.debug.test_debug_mode_equal import text_of, without_own_reads

World = Callable[..., DeviceMesh]


LOCAL = (
    rare.local_tensors,
    rare.local_tensors_in_their_mode,
    rare.compiled_modules,
    rare.nested_region,
    rare.subgraph,
    rare.compiled_now,
    rare.inductor_region,
    rare.inference,
    rare.transforms,
    rare.saved_tensor_hooks,
    rare.jagged,
    rare.sparse,
    rare.element_types,
    rare.meta_and_scalars,
    rare.symbolic_shapes,
    rare.outputs,
    rare.range_entered_before,
    rare.higher_order,
    rare.another_thread,
    rare.selective_checkpoint,
)
FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "functions-ids": {"record_torchfunction": True, "record_ids": True},
    "modules-original-args": {"record_nn_module": True, "store_original_args": True},
    "fake-no-output": {"record_faketensor": True, "record_output": False, "record_localtensor": False},
    "fake": {"record_faketensor": True},
    "interpreter-modules": {"run_compile_with_interpreter": True, "record_nn_module": True},
    "interpreter-stacks": {"run_compile_with_interpreter": True, "record_stack_trace": True},
}
_COMPILED = "torch's mode is not compatible with torch.compile when it records functions"
_VIEWS = "torch's module tracker runs a view of each leaf that is a module's input, and records it"
_GRAPHS = "cond traces a GraphModule, which is no module of the program: only torch's tracker shows it"
_INPUTS = "inductor empties the list of its inputs, which torch's mode reads when it shows it"
_PACKED = "an op that a pack hook runs comes before the op whose node it packs for, whose line only anomaly mode knows"
_HOOKS = "torch's module tracker fails at a rare.subgraph, and its hooks stay behind"
_READS = "torch's mode reads lengths of a LocalTensor by an op, which it records"
_LEAF = "the node that accumulates a gradient was made before the mode: only ours knows the line that used the leaf"
_FAKE_ONLY = "only ops on fake tensors run"
DIFFERENT: dict[tuple[Any, str], str] = {
    (rare.compiled_modules, "functions-ids"): _COMPILED,
    (rare.compiled_now, "functions-ids"): _COMPILED,
    (rare.nested_region, "functions-ids"): _COMPILED,
    (rare.inductor_region, "functions-ids"): _COMPILED,
    (rare.higher_order, "functions-ids"): _COMPILED,
    (rare.higher_order, "modules-original-args"): _GRAPHS,
    (rare.higher_order, "interpreter-modules"): _GRAPHS,
    (rare.inductor_region, "modules-original-args"): _INPUTS,
    (rare.local_tensors, "functions-ids"): _READS,
    (rare.nested_region, "modules-original-args"): _HOOKS,
    (rare.nested_region, "interpreter-stacks"): _LEAF,
    (rare.nested_region, "interpreter-modules"): _HOOKS,
    (rare.saved_tensor_hooks, "interpreter-stacks"): _PACKED,
    (rare.selective_checkpoint, "modules-original-args"): _VIEWS,
    (rare.selective_checkpoint, "interpreter-modules"): _VIEWS,
    (rare.symbolic_shapes, "default"): _FAKE_ONLY,
    (rare.symbolic_shapes, "modules-original-args"): _FAKE_ONLY,
    (rare.symbolic_shapes, "interpreter-modules"): _FAKE_ONLY,
    (rare.symbolic_shapes, "interpreter-stacks"): _FAKE_ONLY,
}
"""Where ours differs from torch's on purpose, or cannot be compared, and why."""


@pytest.fixture(autouse=True)
def nothing_of_torch_s_mode() -> Iterator[None]:
    """It leaves its module hooks and anomaly mode behind where it is entered twice, as for a subgraph."""
    yield
    clean_up()


def clean_up() -> None:
    for hooks in (
        module_hooks._global_forward_hooks,
        module_hooks._global_forward_pre_hooks,
        module_hooks._global_forward_hooks_always_called,
    ):
        hooks.clear()
    torch.autograd.set_detect_anomaly(False)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU: no g++")


def cases() -> Iterator[Any]:
    for program in LOCAL:
        for name, flags in FLAGS.items():
            if (program, name) not in DIFFERENT:
                marks = [needs_compiler] if program is rare.inductor_region else []
                yield pytest.param(program, flags, id=f"{program.__name__}-{name}", marks=marks)


def without_addresses(text: str) -> list[str]:
    """Objects and rare.jagged lengths are numbered anew in each run."""
    return re.sub(r"\bj[0-9]+\b", "j", re.sub(r"0x[0-9a-f]+", "0x", text)).splitlines()


def assert_same(build: Callable[[], Program], flags: dict[str, Any]) -> list[str]:
    theirs = without_addresses(without_own_reads(text_of(TorchDebugMode, build, flags)))
    clean_up()
    ours = without_addresses(text_of(DebugMode, build, flags))
    assert ours == theirs
    assert ours
    return ours


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("program", "flags"), cases())
def test_programs_without_ranks(program: Callable[[], Program], flags: dict[str, Any]) -> None:
    assert_same(program, flags)


@pytest.mark.parametrize("name", sorted(set(FLAGS) - {"interpreter-stacks"}))
def test_deferred_collectives(name: str, fake_world: World) -> None:
    """Without stacks: the line behind a redistribute would be one of torch's mode's own context manager."""
    mesh = fake_world(4)
    assert_same(lambda: rare.deferred(mesh), FLAGS[name])


def recorded(build: Callable[[], Program], **flags: Any) -> list[tuple[int, str, str]]:
    """(depth, kind, line) of each record; torch's own records have no kind."""
    run = build()
    with DebugMode(**flags) as mode:
        run()
    assert mode.failure is None
    return [(call.call_depth, getattr(call, "kind", ""), call.render([])) for call in mode.operators]


@pytest.mark.parametrize("wanted", [True, False])
def test_ops_on_local_tensors_have_their_kind(wanted: bool) -> None:
    kinds = [kind for _, kind, line in recorded(rare.local_tensors, record_localtensor=wanted)]
    assert kinds == (["local_tensor_op"] * 5 if wanted else []) + ["op"]
    inside = [kind for _, kind, line in recorded(rare.local_tensors_in_their_mode) if "add" in line]
    assert inside == ["op", "op"]  # one for each rank: the mode of LocalTensors is asked first


def test_ops_on_deferred_collectives_have_their_kind(fake_world: World) -> None:
    mesh = fake_world(4)
    found = recorded(lambda: rare.deferred(mesh))
    assert [(depth, line) for depth, kind, line in found if kind == "async_op"] == [
        (1, "aten::add.Tensor(t: f32[4, 4], 1)  ->  t: f32[4, 4]"),
        (1, "aten::view(t: f32[16, 4], [-1])  ->  t: f32[64]"),
        (1, "aten::sum(t: f32[64])  ->  t: f32[]"),
        (1, "aten::mul.Tensor(t: f32[4, 4], 2)  ->  t: f32[4, 4]"),
    ]


def test_the_interpreter_shows_regions_and_modules_forward_and_backward() -> None:
    found = recorded(rare.compiled_modules, run_compile_with_interpreter=True, record_nn_module=True)
    lines = [(depth, line) for depth, _, line in found if line.startswith("[")]
    assert lines == [
        (0, "[aot_eager region (compile)] enter"),
        (1, "[nn.Mod (compile)] L['self'].first"),
        (1, "[nn.Mod (compile)] L['self'].second"),
        (0, "[aot_eager region (compile)] exit"),
        (0, "[aot_eager region (compile)] enter"),
        (1, "[nn.Mod (compile)] L['self'].second"),
        (1, "[nn.Mod (compile)] L['self'].first"),
        (0, "[aot_eager region (compile)] exit"),
    ]


def test_a_subgraph_is_shown_with_what_runs_in_it() -> None:
    assert [(depth, line) for depth, _, line in recorded(rare.subgraph, record_nn_module=True)] == [
        (1, "aten::ones([4], device=cpu, pin_memory=False)  ->  t: f32[4]"),
        (1, "torch.ops.higher_order.invoke_subgraph(part, t: f32[4])  ->  ('t: f32[4]',)"),
        (1, "[annotate] [enter InvokeSubgraph HOP] part"),
        (2, "aten::sin(t: f32[4])  ->  t: f32[4]"),
        (2, "aten::add.Tensor(t: f32[4], 1)  ->  t: f32[4]"),
        (1, "[annotate] [exit InvokeSubgraph HOP] part"),
    ]
    assert nn.modules.module._global_forward_hooks == {}


@needs_compiler
def test_an_inductor_region_is_one_record() -> None:
    found = recorded(rare.inductor_region)
    assert [kind for _, kind, _ in found] == ["op", "op"]
    assert found[1][2].startswith("torch.ops.higher_order.inductor_compiled_code(")


class Device:
    """What inductor hands over to wait for the kernel."""

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def synchronize(_device: int) -> None:
        return


@pytest.mark.parametrize("depth", [0, 2])
def test_triton_kernels_are_recorded_as_inductor_tells_of_them(depth: int) -> None:
    texts, hashes = [], []
    for kind in (TorchDebugMode, DebugMode):
        out = torch.zeros(3)
        with kind() as mode, DebugMode.log_tensor_hashes(hash_inputs=True), DebugMode.record_outputs():
            mode.call_depth = depth
            active: Any = get_active_debug_mode()
            call = active.record_triton_kernel(kernel_name="triton_sum_0", kwargs={"in_ptr0": torch.ones(3), "n": 3})
            with torch.utils._python_dispatch._disable_current_modes():
                out += 2
            call.finalize(Device)
            mode.call_depth = 0
        texts.append(mode.debug_string())
        hashes.append((call.pre_hashes, call.post_hashes, list(call.record["output"])))
        assert not hasattr(call, "kwargs")  # no tensor is kept
    assert texts[1] == texts[0]
    assert "[triton] triton_sum_0(in_ptr0=t: f32[3], n=3)" in texts[1]
    assert hashes[1] == hashes[0] == ({"in_ptr0": 3.0}, {"in_ptr0": 3.0}, ["in_ptr0", "n"])


def test_triton_kernels_count_towards_the_limit() -> None:
    with DebugMode(max_records=1) as mode:
        for _ in range(3):
            mode.record_triton_kernel("triton_0", {}).finalize(Device)
    assert (len(mode.operators), mode.dropped_records) == (1, 2)


def test_a_range_left_after_the_mode_leaves_no_depth_behind() -> None:
    """torch's mode counts one level more from then on, whenever it is entered again."""
    stays = record_function("stays")
    with DebugMode() as mode:
        stays.__enter__()
        torch.ones(1)
    stays.__exit__(None, None, None)
    with mode:
        torch.ones(2)
    assert [(call.call_depth, getattr(call, "kind", "")) for call in mode.operators] == [
        (0, "record_function"),
        (2, "op"),
        (1, "op"),
    ]


def test_a_mode_inside_itself(fake_world: World) -> None:
    mesh = fake_world(8)
    programs.mm(mesh)()  # the first time, DTensor computes the sharding on fake tensors
    texts = []
    for kind in (TorchDebugMode, DebugMode):
        run = programs.mm(mesh)
        with kind() as mode:
            with mode:
                run()
            run()
        texts.append(mode.debug_string())
    assert texts[1] == texts[0]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_modules_are_recorded_once_in_a_mode_inside_itself() -> None:
    """torch's mode registers its hooks twice and records each module twice."""
    model = programs.Pair()
    with DebugMode(record_nn_module=True) as mode:
        with mode:
            model(torch.ones(4, 4))
        model(torch.ones(4, 4))
    entries = [(call.call_depth, call.tag) for call in mode.operators if call.kind == "module"]
    assert entries == 2 * [(1, "Pair"), (2, "Pair.first"), (2, "Pair.second")]
    assert nn.modules.module._global_forward_hooks == {}


def test_redistributes_are_in_both_of_two_modes(fake_world: World) -> None:
    """torch's mode tells nobody above it; only the upper one sees ops on DTensors, as with torch's."""
    run = programs.mm(fake_world(8))
    run()
    with DebugMode() as lower, DebugMode() as upper:
        run()
    with DebugMode() as alone:
        run()
    decision = "redistribute_input [implicit] (1, S(0) -> R)"
    assert decision in lower.debug_string()
    assert upper.debug_string() == alone.debug_string()
    assert (lower.call_depth, upper.call_depth, get_active_debug_mode()) == (0, 0, None)


def test_threads_have_modes_of_their_own() -> None:
    """torch's module tracker shows the modules of every thread, without their ops."""
    texts: dict[int, str] = {}
    barrier = threading.Barrier(2, timeout=60)

    def work(width: int) -> None:
        model = nn.Sequential(nn.Linear(width, width))
        with DebugMode(record_nn_module=True) as mode:
            barrier.wait()
            for _ in range(20):
                model(torch.ones(1, width))
            barrier.wait()
        texts[width] = mode.debug_string()

    threads = [threading.Thread(target=work, args=(width,)) for width in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for width, other in ((3, 5), (5, 3)):
        assert texts[width].count(f"t: f32[1, {width}]") > 20
        assert f", {other}]" not in texts[width]
        assert texts[width].splitlines() == 20 * texts[width].splitlines()[: len(texts[width].splitlines()) // 20]


def test_modules_of_a_thread_without_a_mode_are_not_recorded() -> None:
    model = programs.Pair()
    with DebugMode(record_nn_module=True) as mode:
        thread = threading.Thread(target=lambda: model(torch.ones(4, 4)))
        thread.start()
        thread.join()
    assert mode.operators == []


def test_tensors_torch_s_mode_fails_at() -> None:
    """It has no name for quantized types and reads lengths that a nested tensor does not have."""
    x = torch.ones(3)
    parts = [torch.ones(2), x]
    with DebugMode() as mode:
        torch.quantize_per_tensor(x, 0.5, 0, torch.quint8).dequantize()
        torch.nested.as_nested_tensor(parts) * 2
        torch.stack([torch.ones(2), torch.ones(2)])
    assert mode.failure is None
    assert mode.debug_string().splitlines()[:4] == [
        "    aten::quantize_per_tensor(t: f32[3], 0.5, 0, torch.quint8)  ->  t: quint8[3]",
        "    aten::dequantize.self(t: quint8[3])  ->  t: f32[3]",
        "    aten::_nested_tensor_from_tensor_list(['t: f32[2]', 't: f32[3]'])  ->  t: f32[?, ?]",
        "    aten::mul.Tensor(t: f32[?, ?], 2)  ->  t: f32[?, ?]",
    ]


def test_named_tuples_keep_their_values_at_the_function_level() -> None:
    found = recorded(rare.outputs, record_torchfunction=True)
    functions = [line for _, kind, line in found if kind == "torch_function"]
    assert (
        "torch.max(t: f32[2, 2], 1)  ->  torch.return_types.max(\nvalues='t: f32[2]',\nindices='t: i64[2]')"
        in functions
    )
