"""Each kind of record as a message, and the limits of messages at their edges."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._debug_mode import get_active_debug_mode

from commwatch.agent.capture.messages import MAX_VALUES, TEXT_CHARS, Encoder
from commwatch.agent.capture.op_capture import OpCapture
from commwatch.agent.debug import DebugMode
from commwatch.agent.recorder.observer import Observer
from commwatch.v1 import records_pb2
from tests.unit.agent.capture.test_capturer import kind_of
from tests.unit.agent.debug import rare_programs as rare
from tests.unit.agent.debug.programs import Program

World = Callable[..., DeviceMesh]


def capture(build: Callable[[], Program], *, max_records: int = 1000) -> records_pb2.Capture:
    observer = Observer(Path(__file__).parents[1])
    run = build()
    with OpCapture(observer, max_records=max_records) as mode:
        run()
    assert mode.failure is None
    return encoded(mode, observer)


def encoded(mode: Any, observer: Observer) -> records_pb2.Capture:
    encoder = Encoder(mode.operators, mode.collectives, observer.identities, mode.places.lines)
    (part,) = encoder.parts()
    return part


def shown(value: records_pb2.CapturedValue) -> str:
    """As text: ``f32[2, 2]`` for a tensor, ``[a, b]`` for a list, ``name=`` before a keyword."""
    kind = value.WhichOneof("value")
    if kind == "tensor":
        text = f"{value.tensor.dtype}[{', '.join(str(length) for length in value.tensor.shape)}]"
    elif kind == "list":
        text = f"[{', '.join(shown(inner) for inner in value.list.values)}]"
    else:
        text = value.text
    return f"{value.name}={text}" if value.name else text


def line(call: records_pb2.CapturedCall) -> str:
    arguments = ", ".join(shown(value) for value in call.arguments)
    outputs = ", ".join(shown(value) for value in call.outputs)
    return f"{kind_of(call)} {call.name}({arguments}) -> {outputs}"


def lines(part: records_pb2.Capture) -> list[str]:
    return [f"{'  ' * record.depth}{line(part.calls[record.call])}" for record in part.records]


def test_local_tensors() -> None:
    assert lines(capture(rare.local_tensors))[0] == "local_tensor_op aten::add.Tensor(f32[2, 2], 1) -> f32[2, 2]"


def test_deferred_collectives(fake_world: World) -> None:
    mesh = fake_world(4)
    found = lines(capture(lambda: rare.deferred(mesh)))
    assert [text.strip() for text in found if "async_op" in text] == [
        "async_op aten::add.Tensor(f32[4, 4], 1) -> f32[4, 4]",
        "async_op aten::view(f32[16, 4], [-1]) -> f32[64]",
        "async_op aten::sum(f32[64]) -> f32[]",
        "async_op aten::mul.Tensor(f32[4, 4], 2) -> f32[4, 4]",
    ]


def test_subgraphs() -> None:
    assert lines(capture(rare.subgraph)) == [
        "op aten::ones([4], device=cpu, pin_memory=False) -> f32[4]",
        "op torch.ops.higher_order.invoke_subgraph(part, f32[4]) -> f32[4]",
        "  annotation [enter InvokeSubgraph HOP] part() -> ",
        "  op aten::sin(f32[4]) -> f32[4]",
        "  op aten::add.Tensor(f32[4], 1) -> f32[4]",
        "  annotation [exit InvokeSubgraph HOP] part() -> ",
    ]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU: no g++")
def test_a_region_of_inductor_has_the_same_text_in_each_run() -> None:
    name = "torch.ops.higher_order.inductor_compiled_code"
    callable_ = "<torch._higher_order_ops.wrap.InductorCompiledCallable object>"
    assert lines(capture(rare.inductor_region))[-1] == f"op {name}({callable_}, [f32[16]], name=None) -> f32[]"


def test_triton_kernels() -> None:
    def launch() -> None:
        active: Any = get_active_debug_mode()
        active.record_triton_kernel("triton_sum_0", {"in_ptr0": torch.ones(3), "xnumel": 3})

    with_kernel = capture(lambda: launch)
    assert lines(with_kernel)[-1] == "triton_kernel triton_sum_0(in_ptr0=f32[3], xnumel=3) -> "
    assert with_kernel.lines[with_kernel.records[-1].line - 1].function == "launch"


def test_ranges_annotations_and_regions() -> None:
    def run() -> None:
        with torch.profiler.record_function("range"):
            DebugMode._annotate("note")

    assert lines(capture(lambda: run)) == ["record_function range() -> ", "  annotation note() -> "]
    observer = Observer(Path(__file__).parent)
    compiled = rare.compiled_now()
    compiled()
    with OpCapture(observer) as mode:
        mode.run_compile_with_interpreter = True
        compiled()
    kinds = [line(encoded(mode, observer).calls[record.call]) for record in encoded(mode, observer).records]
    assert (kinds[1], kinds[-1]) == ("region enter() -> ", "region exit() -> ")


def test_tensors_of_every_sort() -> None:
    def run() -> None:
        torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]).mul(2)
        torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8)
        torch.empty(2, 3, device="meta").sin()
        torch.tensor(3.0).sin()
        torch.ones(2, dtype=torch.complex64).conj()

    found = lines(capture(lambda: run))
    for expected in (
        "op aten::mul.Tensor(f32[-1, -1], 2) -> f32[-1, -1]",
        "op aten::quantize_per_tensor(f32[3], float, 0, torch.quint8) -> quint8[3]",
        "op aten::sin(f32[2, 3]) -> f32[2, 3]",
        "op aten::sin(f32[]) -> f32[]",
        "op aten::_conj(c64[2]) -> c64[2]",
    ):
        assert expected in found


def custom(schema: str) -> Any:
    library = torch.library.Library("commwatch_messages", "FRAGMENT")
    library.define(f"taker({schema}) -> ()")
    library.impl("taker", lambda *_args, **_kwargs: None, "CompositeExplicitAutograd")
    return library


@pytest.mark.parametrize("count", [MAX_VALUES - 1, MAX_VALUES, MAX_VALUES + 1, 3 * MAX_VALUES])
def test_long_lists_say_how_many_more_there_were(count: int) -> None:
    library = custom("int[] numbers")
    part = capture(lambda: lambda: torch.ops.commwatch_messages.taker(list(range(count))))
    (call,) = part.calls
    values = [value.text for value in call.arguments[0].list.values]
    rest = [f"... {count - MAX_VALUES} more"] if count > MAX_VALUES else []
    assert values == [str(number) for number in range(min(count, MAX_VALUES))] + rest
    library._destroy()


@pytest.mark.parametrize("length", [TEXT_CHARS - 1, TEXT_CHARS, TEXT_CHARS + 1, 5000])
def test_long_texts_end_in_dots(length: int) -> None:
    library = custom("str text")
    part = capture(lambda: lambda: torch.ops.commwatch_messages.taker("x" * length))
    text = part.calls[0].arguments[0].text
    assert text == ("x" * length if length <= TEXT_CHARS else "x" * (TEXT_CHARS - 3) + "...")
    library._destroy()


def test_long_names_are_cut() -> None:
    part = capture(lambda: lambda: DebugMode._annotate("n" * (TEXT_CHARS + 1)))
    assert part.calls[0].name == "n" * TEXT_CHARS


@pytest.mark.parametrize("levels", [1, 8, 9, 30])
def test_deep_lists_become_text(levels: int) -> None:
    nested: Any = 7
    for _ in range(levels):
        nested = [nested]
    observer = Observer(Path(__file__).parent)
    with OpCapture(observer) as mode:
        active: Any = mode
        active.record_triton_kernel("kernel", {"argument": nested})
    value = encoded(mode, observer).calls[0].arguments[0]
    found = 0
    while value.WhichOneof("value") == "list":
        (value,) = value.list.values
        found += 1
    assert found == min(levels, 8)
    assert value.text == "[" * (levels - found) + "7" + "]" * (levels - found)


@pytest.mark.parametrize(("limit", "kept", "dropped"), [(2, 2, 1), (3, 3, 0), (4, 3, 0)])
def test_records_beyond_the_limit_are_counted(limit: int, kept: int, dropped: int) -> None:
    observer = Observer(Path(__file__).parent)
    x = torch.ones(2)
    with OpCapture(observer, max_records=limit) as mode:
        for _ in range(3):
            x.sin()
    assert (len(mode.operators), mode.dropped_records) == (kept, dropped)
    assert len(encoded(mode, observer).records) == kept


def test_no_records_are_one_empty_part() -> None:
    part = capture(lambda: lambda: None)
    assert (len(part.records), len(part.calls)) == (0, 0)
