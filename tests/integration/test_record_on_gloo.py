"""Exact counts on real gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.ranks import PROGRAMS, run_ranks

pytestmark = pytest.mark.ranks
GROUPS = ["(root)", "layers.0", "layers.1"]


def gathers(phase: str, modules: list[str]) -> list[list[object]]:
    return [[phase, "all_gather", module, 1] for module in modules]


def test_fsdp2_gathers_and_scatters(tmp_path: Path) -> None:  # test_fully_shard_comm.py
    run_ranks(PROGRAMS / "fsdp2.py", [str(tmp_path)], 2)
    scatters: list[list[object]] = [["backward", "reduce_scatter", module, 1] for module in GROUPS]
    expected = {
        "true": gathers("backward", GROUPS) + scatters + gathers("forward", GROUPS),
        "false": scatters + gathers("forward", GROUPS),
        "default": gathers("backward", GROUPS[1:]) + scatters + gathers("forward", GROUPS),
    }
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected


def test_gpipe_sends_and_receives_and_survives(tmp_path: Path) -> None:
    run_ranks(PROGRAMS / "pipeline.py", [str(tmp_path)], 2)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [entry["equal"] for entry in found] == [True, True]
    for entry in found:
        totals: dict[str, int] = {}
        for _, kind, count in entry["counts"]:
            totals[kind] = totals.get(kind, 0) + count
        assert totals == {"send": 4, "recv": 4}


def test_gloo_s_own_numbers_confirm_every_kind_and_show_a_call_that_passed_by(tmp_path: Path) -> None:
    root = str(PROGRAMS.parent.parent.parent)
    run_ranks(PROGRAMS / "completeness.py", [str(tmp_path)], 2, {"PYTHONPATH": root})
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["errors"] == []
        assert found["calls"] == [22, 22, 2, 1, 1]
        # The monitored barrier's step is left out for its group, and only there.
        assert found["before"] == [46, 45, 1]
        assert found["after"] == [48, 48, 1]
        assert found["groups"] == [["dp", 24, 25, "sequence"], ["pair", 23, 23, "sequence"]]
        assert found["unequal"] == [1, 4, 5, 0]
