"""The chain behind a call, the sites a text stands for, and where a capture shows one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commwatch.service.domain.captures import CapturedRecord, CapturedStep, CaptureSummary
from commwatch.service.domain.explaining import (
    Link,
    TreePath,
    chain,
    find_in_capture,
    matching_sites,
    remedy,
    site_in_words,
)
from commwatch.service.domain.records import Cause, Line
from commwatch.service.domain.sites import site_of
from commwatch.service.domain.steady_run import SteadySite
from tests.contract.samples import capture
from tests.unit.service.domain.jobs import IMPLICIT, Calls, Job, layers

GATHER = Calls("all_gather", "layers.*.wo", 2, 1024, cause=IMPLICIT, line=Line("model.py", 88, "forward"))
STEP = (
    *layers(4, GATHER, Calls("all_reduce", "layers.*.wo", 1, 64)),
    Calls("all_reduce", "", 1, 64, "clip", dtype=""),
    Calls("all_gather", "(root)", 1, 64, cause=Cause("S(0)", "R", False, "")),
)


SITE = site_of(replace(GATHER, module="layers.7.wo").call)


def sites() -> dict[str, SteadySite]:
    return {f"{site.site.kind}:{site.site.module}": site for site in Job(step=STEP).steady().sites}


def test_the_chain_goes_from_the_line_to_the_collective() -> None:
    assert chain(sites()["all_gather:layers.*.wo"]) == (
        Link("line", "model.py:88 in forward"),
        Link("module", "layers.*.wo (4 modules)"),
        Link("op", "aten.mm.default"),
        Link("redistribute", "implicit, S(0) -> R"),
        Link("collective", "all_gather (c10d::all_gather_) on tp (2 ranks, stride 1), forward, float32"),
        Link("step", "32 calls a step over 4 ranks (8 on each), 32.8 kB payload"),
    )


def test_what_is_unknown_is_said() -> None:
    assert [link.text for link in chain(sites()["all_reduce:"])][:4] == [
        "no line of the program known",
        "no module known",
        "no op known",
        "no redistribute known",
    ]
    explicit = [link.text for link in chain(sites()["all_gather:(root)"])]
    assert explicit[1:4] == [
        "(root)",
        "no op: the program asked for the redistribute itself",
        "explicit, S(0) -> R",
    ]


def test_only_an_implicit_redistribute_of_an_op_has_a_remedy() -> None:
    found = sites()
    assert remedy(found["all_gather:layers.*.wo"].site) == (
        "aten.mm.default was given an argument with the placements S(0) and runs on R. What usually helps is to make "
        "that argument with R, to give the op's other arguments placements with which it runs on S(0), or, where "
        "several ops use it, to redistribute it once for all of them."
    )
    assert [remedy(found[name].site) for name in ("all_reduce:", "all_gather:(root)", "all_reduce:layers.*.wo")] == [
        ""
    ] * 3


def test_partial_results_have_to_be_reduced_somewhere() -> None:
    site = replace(SITE, cause=Cause("[S(0), P(sum)]", "[S(0), R]", True, "aten.relu.default"))
    assert remedy(site) == (
        "aten.relu.default was given partial results, [S(0), P(sum)], and runs on [S(0), R]: they have to be reduced. "
        "What usually helps is to reduce them once where several ops use them, or to shards where the ops that follow "
        "run on shards."
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all_gather:layers.*.wo", ["all_gather:layers.*.wo"]),
        ("layers.*.wo", ["all_gather:layers.*.wo", "all_reduce:layers.*.wo"]),
        ("layers.3.wo", ["all_gather:layers.*.wo", "all_reduce:layers.*.wo"]),
        ("all_reduce:*wo", ["all_reduce:layers.*.wo"]),
        ("*", ["all_gather:(root)", "all_gather:layers.*.wo", "all_reduce:layers.*.wo", "all_reduce:"]),
        ("?*", ["all_gather:(root)", "all_gather:layers.*.wo", "all_reduce:layers.*.wo"]),
        ("(root)", ["all_gather:(root)"]),
        ("all_reduce:", ["all_reduce:"]),
        ("gossip:layers.*.wo", []),
        ("layers", []),
    ],
)
def test_a_text_stands_for_sites_by_module_and_kind(text: str, names: list[str]) -> None:
    found = sites()
    assert [site.site for site in matching_sites(list(found.values()), text)] == [found[name].site for name in names]


def test_the_start_of_an_id_names_a_site_and_four_characters_are_the_least() -> None:
    found = list(sites().values())
    for site in found:
        assert matching_sites(found, site.site.hash[:4].upper()) == [site]
        assert matching_sites(found, site.site.hash) == [site]
        assert matching_sites(found, site.site.hash[:3]) == []


def test_sites_are_told_apart_in_words() -> None:
    site = sites()["all_gather:layers.*.wo"].site
    assert site_in_words(site) == f"{site.hash[:8]} (forward all_gather in layers.*.wo on tp, S(0) -> R)"
    other = sites()["all_reduce:"].site
    assert site_in_words(other) == f"{other.hash[:8]} (clip all_reduce without a module on tp)"


def captured(**changes: object) -> CapturedStep:
    found = replace(capture(), **changes)  # type: ignore[arg-type]
    return CapturedStep(CaptureSummary(2, 3, 1, True, 0, 6, 1, 0, "", 1), found.calls, found.lines, found.records)


def test_a_capture_shows_the_path_to_the_first_call_of_a_site() -> None:
    assert find_in_capture(captured(), SITE) == TreePath(
        2,
        3,
        (
            (0, "[nn.Mod] layers.0.wo"),
            (1, "aten::mm(dt: f32[8, 8]| S(0), dt: f32[8, 32]| S(0))  ->  dt: f32[8, 32]| S(0)"),
            (2, "redistribute_input [implicit] (1, S(0) -> R)"),
            (3, "redistribute_input(t: f32[4, 32], trace: S(0)->R)"),
            (4, "_c10d_functional::all_gather_into_tensor(t: f32[4, 32], 2, 0)  ->  t: f32[8, 32]"),
        ),
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(SITE, kind="all_reduce"),
        replace(SITE, phase="backward"),
        replace(SITE, module="layers.*.wq"),
        replace(SITE, group=replace(SITE.group, stride=4)),
        replace(SITE, cause=None),
        replace(SITE, cause=replace(IMPLICIT, src="S(1)")),
        replace(SITE, cause=replace(IMPLICIT, implicit=False)),
        replace(SITE, dtype="bfloat16"),
    ],
)
def test_a_call_of_another_site_is_not_shown_for_it(other: object) -> None:
    assert find_in_capture(captured(), other) is None  # type: ignore[arg-type]


def test_placements_of_several_dimensions_and_unknown_types_are_compared_as_far_as_both_say() -> None:
    calls = list(capture().calls)
    for place in (2, 3):
        redistribute = calls[place].redistribute
        assert redistribute is not None
        calls[place] = replace(calls[place], redistribute=replace(redistribute, src="S(0)R", dst="RR"))
    wide = replace(SITE, cause=Cause("[S(0), R]", "[R, R]", True, "aten.mm.default"), dtype="float8_e4m3fn")
    assert find_in_capture(captured(calls=tuple(calls)), wide) is not None


def test_a_redistribute_without_a_decision_above_it_was_asked_for_by_the_program() -> None:
    # As in backward, where nothing else marks it as explicit.
    records = (CapturedRecord(0, 3, 0), CapturedRecord(1, 4, 0, 1))
    explicit = replace(SITE, cause=Cause("S(0)", "R", False, ""))
    found = find_in_capture(captured(records=records), explicit)
    assert found is not None
    assert [depth for depth, _ in found.records] == [0, 1]
    assert find_in_capture(captured(records=records), SITE) is None


def test_a_collective_outside_of_a_redistribute_belongs_to_a_site_without_cause() -> None:
    alone = captured(records=(CapturedRecord(0, 4, 0, 1),))
    assert find_in_capture(alone, SITE) is None
    assert find_in_capture(alone, replace(SITE, cause=None)) == TreePath(
        2, 3, ((0, "_c10d_functional::all_gather_into_tensor(t: f32[4, 32], 2, 0)  ->  t: f32[8, 32]"),)
    )
