"""Starts real ranks with torchrun on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 90


def rank_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without any COMMWATCH_ variable, plus ``extra``; ranks use one thread each."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COMMWATCH_")}
    return {**clean, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(extra or {})}


def torchrun(script: Path, arguments: Sequence[str], ranks: int, *options: str) -> list[str]:
    """The command that runs a script on ``ranks`` local ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    return [*launcher, *rendezvous, *options, str(script), *arguments]


def run_ranks(
    script: Path,
    arguments: Sequence[str],
    ranks: int,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    options: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run to the end. Raises CalledProcessError with the output attached when a rank fails."""
    finished = subprocess.run(
        torchrun(script, arguments, ranks, *options),
        env=rank_environment(environment),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if finished.returncode:
        sys.stderr.write(finished.stdout + finished.stderr)
        finished.check_returncode()
    return finished
