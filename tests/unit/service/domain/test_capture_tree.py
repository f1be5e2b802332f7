"""Which records of a capture are shown, and how they read."""

from __future__ import annotations

import json

import pytest

from commwatch.service.domain.capture_text import render_call, tree_lines
from commwatch.service.domain.capture_tree import Filter, is_trivial, parents_of, path_to, select
from commwatch.service.domain.captures import (
    CapturedCall,
    CapturedCollective,
    CapturedRecord,
    CapturedRedistribute,
    CapturedStep,
    CapturedTensor,
    CapturedValue,
    CaptureSummary,
)
from commwatch.service.domain.forms.captures import captured_step_from_json, captured_step_to_json
from tests.contract.samples import FORWARD, SOLO, TP, capture, tensor

SUMMARY = CaptureSummary(0, 3, 1, True, 0, 0, 0, 0, "", 1)
GATHERED = "  # all_gather on tp (2 ranks, stride 1), forward, layers.0.wo, call 1; model.py:12 in forward"
TREE = [
    "[nn.Mod] layers.0.wo",
    "  aten::mm(dt: f32[8, 8]| S(0), dt: f32[8, 32]| S(0))  ->  dt: f32[8, 32]| S(0)",
    "    redistribute_input [implicit] (1, S(0) -> R)",
    "      redistribute_input(t: f32[4, 32], trace: S(0)->R)",
    f"        _c10d_functional::all_gather_into_tensor(t: f32[4, 32], 2, 0)  ->  t: f32[8, 32]{GATHERED}",
    "    aten::t(t: f32[8, 32])  ->  t: f32[32, 8]",
]


def step_of(*nodes: tuple[int, CapturedCall]) -> CapturedStep:
    records = tuple(CapturedRecord(depth, index) for index, (depth, _) in enumerate(nodes))
    return CapturedStep(SUMMARY, tuple(call for _, call in nodes), (), records)


def sample() -> CapturedStep:
    found = capture()
    return CapturedStep(SUMMARY, found.calls, found.lines, found.records)


def issue(kind: str, module: str, group: str = "tp") -> CapturedCall:
    return CapturedCall(
        "op",
        f"_c10d_functional::{kind}",
        collectives=(CapturedCollective(kind, TP if group == "tp" else SOLO, "backward", module),),
    )


# Two modules, one called in the other; a redistribute without collectives; ops of every level of noise.
WIDE = step_of(
    (0, CapturedCall("module", "layers.0")),
    (1, CapturedCall("module", "layers.0.wo")),
    (2, CapturedCall("dtensor_op", "aten::mm")),
    (3, CapturedCall("op", "aten::mm")),
    (2, CapturedCall("dtensor_op", "aten::detach")),
    (1, CapturedCall("torch_function", "torch.Tensor.detach")),
    (0, CapturedCall("record_function", "loss")),
    (1, issue("all_reduce", "layers.1.wo")),
    (0, CapturedCall("redistribute", "", redistribute=CapturedRedistribute(None, "R", "S(0)", "", False))),
    (0, CapturedCall("annotation", "here")),
)


def test_the_tree_reads_as_debug_mode_writes_it_with_what_that_loses_behind() -> None:
    assert tree_lines(sample(), select(sample(), Filter())) == TREE


def test_the_mesh_is_added_where_it_is_asked_for() -> None:
    assert tree_lines(sample(), [1], mesh=True) == [
        "  aten::mm(dt: f32[8, 8]| S(0) on DM(2), dt: f32[8, 32]| S(0) on DM(2))  ->  dt: f32[8, 32]| S(0) on DM(2)"
    ]
    two = CapturedCall("op", "x", (tensor("dt", 4, placements="RS(0)", mesh=(2, 2)),))
    assert render_call(two, mesh=True) == "x(dt: f32[4]| RS(0) on DM(2, 2))"


def named(name: str, *values: CapturedValue) -> CapturedValue:
    return CapturedValue(name, values)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (CapturedCall("op", "aten::barrier"), "aten::barrier()"),
        (CapturedCall("op", "f", (CapturedValue("dim", "1"), CapturedValue("", "x"))), "f(dim=1, x)"),
        (CapturedCall("op", "f", (named("", tensor("t", 2), tensor("t", 3)),)), "f(['t: f32[2]', 't: f32[3]'])"),
        (CapturedCall("op", "f", (named("sizes", CapturedValue("", "1"), named("")),)), "f(sizes=[1, []])"),
        (CapturedCall("op", "f", (), (tensor("t", 2), tensor("t"))), "f()  ->  ('t: f32[2]', 't: f32[]')"),
        (CapturedCall("fake_op", "f", (tensor("ft", -1, 2),)), "f(ft: f32[?, 2])"),
        (
            CapturedCall("op", "f", (CapturedValue("", CapturedTensor("t", "bf16", (2,), "", (), 5)),)),
            "f(t$5: bf16[2])",
        ),
        (CapturedCall("triton_kernel", "k", (CapturedValue("n", "8"),)), "[triton] k(n=8)"),
        (CapturedCall("module", "layers.0"), "[nn.Mod] layers.0"),
        (CapturedCall("record_function", "loss"), "[record function] loss"),
        (CapturedCall("annotation", "here"), "[annotate] here"),
        (CapturedCall("region", "enter inductor"), "[region] enter inductor"),
        (CapturedCall("output_placements", "S(0)"), "-> output: S(0)"),
        (
            CapturedCall(
                "redistribute",
                "",
                (tensor("t", 2),),
                (tensor("t", 4),),
                CapturedRedistribute(None, "S(0)", "R", "S(0)->R", False),
            ),
            "redistribute_input [explicit] (t: f32[2], trace: S(0)->R)  ->  t: f32[4]",
        ),
    ],
)
def test_every_kind_of_record_has_its_shorthand(call: CapturedCall, text: str) -> None:
    assert render_call(call) == text


def test_collectives_say_what_is_unknown_and_hashes_stand_last() -> None:
    calls = (issue("all_reduce", ""), CapturedCall("op", "many", collectives=(*issue("send", "a").collectives,) * 2))
    records = (CapturedRecord(0, 0, output_hash="1.5"), CapturedRecord(0, 1, 0, 7))
    unknown, sent = tree_lines(CapturedStep(SUMMARY, calls, (FORWARD,), records), [0, 1])
    on = "on tp (2 ranks, stride 1), backward"
    assert unknown == (
        f"_c10d_functional::all_reduce()  # all_reduce {on}, no module, at an unknown position; hash 1.5"
    )
    assert sent == f"many()  # send {on}, a, call 7; send {on}, a, call 8; model.py:12 in forward"


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [
        (Filter(), list(range(10))),
        (Filter(noise=2), [0, 1, 2, 3, 6, 7, 8, 9]),
        (Filter(noise=1), [0, 1, 2, 6, 7, 8]),
        (Filter(noise=0), [6, 7]),
        (Filter(depth=1), [0, 6, 8, 9]),
        (Filter(depth=2), [0, 1, 5, 6, 7, 8, 9]),
        (Filter(kinds=frozenset({"op"})), [0, 1, 2, 3, 6, 7]),
        (Filter(kinds=frozenset({"all_reduce", "annotation"})), [6, 7, 9]),
        (Filter(kinds=frozenset({"all_gather"})), []),
        (Filter(module="layers.0.wo"), [0, 1, 2, 3, 4]),
        (Filter(module="layers.*.wo"), [0, 1, 2, 3, 4, 6, 7]),
        (Filter(module="layers.0"), [0, 1, 2, 3, 4, 5]),
        (Filter(module="layers.1*"), [6, 7]),
        (Filter(module="layers.*.wo", noise=0), [6, 7]),
        (Filter(frozenset({"op"}), "layers.0*", 3, 3), [0, 1, 2]),
    ],
)
def test_what_matches_is_shown_with_all_above_it(wanted: Filter, shown: list[int]) -> None:
    assert select(WIDE, wanted) == shown


def test_what_ran_in_the_backward_of_a_module_is_found_by_its_name() -> None:
    captured = step_of((0, CapturedCall("module", "layers.0.wo (backward)")), (1, CapturedCall("op", "aten::mm")))
    assert select(captured, Filter(module="layers.*.wo")) == [0, 1]
    assert select(captured, Filter(module="layers.1")) == []


def test_the_nearest_less_deep_record_before_is_the_parent_whatever_the_jumps() -> None:
    records = [CapturedRecord(depth, 0) for depth in (2, 5, 5, 3, 0, 1, 1000, 1)]
    assert parents_of(records) == [None, 0, 0, 0, None, 4, 5, 4]
    assert path_to(records, 6) == [4, 5, 6]
    assert path_to(records, 2) == [0, 2]


@pytest.mark.parametrize(
    ("kind", "name", "trivial"),
    [
        ("op", "aten::detach", True),
        ("op", "aten::transpose.int", True),
        ("torch_function", "torch.Tensor.view", True),
        ("dtensor_op", "aten::_to_copy", True),
        ("op", "aten::view_as", False),
        ("op", "aten::mm", False),
        ("op", "mine::t_.out", False),
        ("module", "t", False),
        ("annotation", "aten::t", False),
    ],
)
def test_trivial_ops_are_told_by_their_name(kind: str, name: str, trivial: bool) -> None:
    assert is_trivial(CapturedCall(kind, name)) is trivial


def test_a_capture_survives_json() -> None:
    deep = CapturedCall("op", "f", (named("a", tensor("dt", 2, placements="R", mesh=(2, 2)), named("", named(""))),))
    whole = CapturedStep(
        CaptureSummary(1, 4, 2, False, 9, 8, 1, 3, "full", 17),
        (*sample().calls, deep),
        sample().lines,
        (*sample().records, CapturedRecord(3, 6, output_hash="x")),
    )
    form = json.loads(json.dumps(captured_step_to_json(whole)))
    assert captured_step_from_json(form) == whole
    assert captured_step_from_json({**form, "more": 1, "capture": {**form["capture"], "newer": 2}}) == whole
