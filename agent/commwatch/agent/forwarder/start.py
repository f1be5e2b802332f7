"""Starts the forwarder from the rank, without leaving anything of it there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from commwatch.agent.spool import names

ROOT_VARIABLE = "COMMWATCH_PROGRAM_ROOT"
START_LIMIT_S = 10.0

# Signals that a scheduler sends to all processes of a job stay ignored until the forwarder can tell what to do.
_SPAWN = (
    "import os, signal as s, sys\n"
    "for number in (s.SIGTERM, s.SIGINT, s.SIGHUP): s.signal(number, s.SIG_IGN)\n"
    "os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)\n"
)


def start_forwarder(folder: Path, root: Path, environ: Mapping[str, str], *, describe_only: bool) -> None:
    """Start ``python -m commwatch.agent.forwarder``. Raises OSError.

    A launcher kills its workers' process groups and waits for the end of their output: so the forwarder has a session
    of its own and inherits no descriptor. It is no child of the rank either: a program that waits for any child, or
    kills all of them, must not find it. The process in between is gone in some 10 ms.
    """
    if not sys.executable:
        raise OSError("this Python does not know its own program")
    options = ["--describe"] if describe_only else []
    variables = {**environ, ROOT_VARIABLE: str(root), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    paths = environ.get("PYTHONPATH")
    if paths:  # the forwarder runs in another folder
        variables["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in paths.split(os.pathsep) if path)
    forwarder = [sys.executable, "-m", "commwatch.agent.forwarder", *options, str(folder)]
    with (folder / names.LOG).open("ab") as log:  # where a missing grpc would be told
        between = subprocess.Popen(
            [sys.executable, "-S", "-c", _SPAWN, *forwarder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd=folder,
            env=variables,
            start_new_session=True,
        )
    try:
        status = between.wait(START_LIMIT_S)
    except subprocess.TimeoutExpired:
        between.kill()
        raise OSError(f"{sys.executable} did not start within {START_LIMIT_S:g} s") from None
    if status:
        raise OSError(f"{sys.executable} could not start the forwarder (exit code {status})")
