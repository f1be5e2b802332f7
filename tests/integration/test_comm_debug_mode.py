"""CommDebugMode on real gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.ranks import PROGRAMS, run_ranks

pytestmark = pytest.mark.ranks


def test_pipeline_schedules_survive_and_are_counted(tmp_path: Path) -> None:
    run_ranks(PROGRAMS / "comm_pipeline.py", [str(tmp_path)], 2)
    for rank, roots in enumerate((["Sequential"], ["Sequential", "MSELoss"])):
        expected = {
            "counts": {"c10d.send": 4, "c10d.recv_": 4},
            "modules": {"Global": roots, "Sequential": ["Sequential.0", "Sequential.1"]},
            "equal": True,
            "forwards": 4,
        }
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {"gpipe": expected, "1f1b": expected}


def test_data_parallel_steps_have_torchs_counts(tmp_path: Path) -> None:
    run_ranks(PROGRAMS / "comm_ddp.py", [str(tmp_path)], 2)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        ddp = {"forward": {}, "backward": {"c10d.allreduce_": 1}}
        fsdp2 = {
            "forward": {"c10d._allgather_base_": 2},
            "backward": {"c10d._allgather_base_": 2, "c10d._reduce_scatter_base_": 2},
        }
        assert found == {"ddp": [ddp, ddp], "fsdp2": [fsdp2, fsdp2]}
