"""Captures of real ranks: planned by a variable, and asked for while the job runs."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.live_service import LiveService, until
from tests.integration.ranks import PROGRAMS, rank_environment, run_ranks, torchrun

pytestmark = pytest.mark.ranks
LOOP = PROGRAMS / "loop.py"


def environment(service: LiveService, tmp_path: Path, **extra: str) -> dict[str, str]:
    return {"COMMWATCH_ENDPOINT": service.endpoint, "COMMWATCH_SPOOL_DIR": str(tmp_path / "spool"), **extra}


def commwatch(service: LiveService, *arguments: str) -> str:
    """What a command prints; the command must succeed."""
    command = [sys.executable, "-m", "commwatch.service.cli", *arguments, "--url", service.http_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder: Path, rank: int) -> list[float]:
    found: list[float] = json.loads((folder / f"{rank}.json").read_text())["losses"]
    return found


def test_a_planned_step_is_stored_and_shown_and_the_job_computes_the_same(service: LiveService, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    run_ranks(LOOP, [str(plain)], 2)
    run_ranks(LOOP, [str(tmp_path)], 2, environment(service, tmp_path, COMMWATCH_CAPTURE_STEPS="2"))
    assert [losses(tmp_path, rank) for rank in range(2)] == [losses(plain, rank) for rank in range(2)]
    run = service.only_run()
    with service.client() as client:
        captures = client.captures(run)["captures"]
        tree = client.capture(run, 1, 2)
    assert [(entry["rank"], entry["step"]) for entry in captures] == [(0, 2), (1, 2)]
    issued = [collective for record in tree["records"] for collective in tree["calls"][record["call"]]["collectives"]]
    assert [(entry["kind"], entry["phase"], entry["module"]) for entry in issued] == [
        ("all_reduce", "forward", "layer"),
        ("all_reduce", "other", ""),
        ("all_reduce", "other", ""),
    ]
    text = commwatch(service, "show", run, "--step", "2", "--rank", "1")
    assert "[nn.Mod] (root)\n  [nn.Mod] layer\n    [nn.Mod] layer.linear\n" in text
    assert "loop.py:" in text
    only = commwatch(service, "show", run, "--step", "2", "--noise", "0")
    assert [line.split("(")[0].strip() for line in only.splitlines() if "c10d::" in line] == ["c10d::allreduce_"] * 3


def test_a_running_job_is_asked_for_its_next_steps(service: LiveService, tmp_path: Path) -> None:
    release = tmp_path / "go"
    extra = environment(service, tmp_path, WAIT_FILE=str(release), COMMWATCH_HEARTBEAT_S="0.1")
    job = subprocess.Popen(torchrun(LOOP, [str(tmp_path)], 2), env=rank_environment(extra))
    asking: subprocess.Popen[str] | None = None
    try:
        until(lambda: (tmp_path / "half-0").exists() and (tmp_path / "half-1").exists())
        run = service.only_run("running")
        command = [sys.executable, "-m", "commwatch.service.cli", "capture", run, "--ranks", "0,1", "--steps", "2"]
        asking = subprocess.Popen(
            [*command, "--wait", "60", "--url", service.http_url], stdout=subprocess.PIPE, text=True
        )

        def passed_on() -> bool:
            words = [
                struct.unpack_from("=Q", page.read_bytes(), 16)[0] for page in (tmp_path / "spool").glob("*/*/page")
            ]
            return len(words) == 2 and all(words)

        until(passed_on)
        release.touch()
        out, _ = asking.communicate(timeout=90)
        assert asking.returncode == 0, out
        assert job.wait(timeout=90) == 0
    finally:
        for process in (job, asking):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    run = service.only_run()
    with service.client() as client:
        captures = client.captures(run)["captures"]
    assert [(entry["step"], entry["rank"]) for entry in captures] == [(6, 0), (6, 1), (7, 0), (7, 1)]
    assert "commwatch show" in out
