"""Starts the forwarder from the rank, without leaving anything of it there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT_VARIABLE = "COMMWATCH_PROGRAM_ROOT"


_started: list[subprocess.Popen[bytes]] = []
"""Kept so that nothing polls or warns about a process that is meant to outlive this one."""


def start_forwarder(folder: Path, root: Path, environ: Mapping[str, str], *, describe_only: bool) -> None:
    """Start ``python -m commwatch.agent.forwarder`` and return at once. Raises OSError.

    A launcher kills its workers' process groups and waits for the end of their output: so the forwarder has a session
    of its own and inherits no descriptor.
    """
    options = ["--describe"] if describe_only else []
    variables = {**environ, ROOT_VARIABLE: str(root), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    paths = environ.get("PYTHONPATH")
    if paths:  # the forwarder runs in another folder
        variables["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in paths.split(os.pathsep) if path)
    _started.append(
        subprocess.Popen(
            [sys.executable, "-m", "commwatch.agent.forwarder", *options, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=variables,
            start_new_session=True,
        )
    )
