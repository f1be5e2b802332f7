"""``commwatch demo`` as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.ranks import rank_environment


@pytest.mark.ranks
def test_the_demo_catches_the_commit_that_communicates_more(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    finished = subprocess.run(
        [sys.executable, "-m", "commwatch.service.cli", "demo", "--steps", "6", "--keep", str(kept)],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    text = re.sub(r"\s+", " ", finished.stdout)
    assert (
        "+1 all_gather per layer (x4) in layers.*.wo, forward: implicit redistribute S(1) -> R asked by aten.mm.default"
        " at model.py:39"
    ) in text
    assert "+16 calls, +524 kB payload per step over 4 ranks" in text
    assert "calls per step: 156 -> 220 over all ranks" in text
    assert "alert raised" in text
    assert "gate: exit 1 regression" in text
    assert (
        "line model.py:39 in mix module layers.*.wo (4 modules) op aten.mm.default redistribute implicit, S(1) -> R"
        " collective all_gather "
    ) in text
    assert "step 16 calls a step over 4 ranks (4 on each), 524 kB payload" in text
    tree = finished.stdout[finished.stdout.index("--step 3") :].splitlines()
    path = ["[nn.Mod] layers.0", "[nn.Mod] layers.0.wo", "aten::mm(", "redistribute_input [implicit] (0, S(1) -> R)"]
    at = [next(index for index, line in enumerate(tree) if line.strip().startswith(start)) for start in path]
    assert at == sorted(at)
    assert "all_gather on tp (2 ranks, stride 1), forward, layers.0.wo, call " in text
    assert "What to run next:" in text
    assert (kept / "commwatch.db").exists()
    assert (kept / "job" / "model.py").read_text().count('"wo": Shard(0),') == 1
