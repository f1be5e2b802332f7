"""A job whose collectives go into a CUDA graph, from its ranks to what people are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.live_service import LiveService
from tests.integration.ranks import PROGRAMS, run_ranks

pytestmark = pytest.mark.ranks


def commwatch(service: LiveService, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    command = [sys.executable, "-m", "commwatch.service.cli", *arguments, "--url", service.http_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    return done.returncode, done.stdout


def test_steps_that_replay_a_graph_are_not_taken_for_steps_without_collectives(
    service: LiveService, tmp_path: Path
) -> None:
    environment = {"COMMWATCH_ENDPOINT": service.endpoint, "COMMWATCH_SPOOL_DIR": str(tmp_path / "spool")}
    run_ranks(PROGRAMS / "graphs.py", [], 2, environment)
    run = service.only_run()
    code, out = commwatch(service, "show", run)
    assert code == 0
    assert "recorded    24 of at least 24 collectives, 0 without module\n" in out
    told = "graphs not observable: replays of CUDA graphs, which hold 3 collectives of each of ranks 0-1"
    assert told in " ".join(out.split())
    assert "steady step" not in out
    code, out = commwatch(service, "show", run, "--json")
    report = json.loads(out)
    assert [(rank["steps"], rank["calls"], rank["completeness"]["graph_calls"]) for rank in report["ranks"]] == [
        (10, 12, 3),
        (10, 12, 3),
    ]
    reason = (
        "Ranks 0-1 captured 6 collectives into CUDA graphs, whose replays are not observable: "
        "what was recorded is a lower bound."
    )
    assert report["reasons"] == [{"code": "graph_replays", "message": reason}]
    code, out = commwatch(service, "compare", run, run, "--json")
    assert (code, json.loads(out)["verdict"]) == (3, "no_verdict")
