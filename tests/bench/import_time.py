"""``import torch`` with commwatch installed and no variable set, against entry points switched off."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

PAIRS = 9
_PROGRAM = "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"
_HOOK = (
    "import torch, time; from importlib.metadata import entry_points;"
    "(point,) = [point for point in entry_points(group='torch.backends') if point.name == 'commwatch'];"
    "start = time.perf_counter();"
    "point.load()();"
    "print(time.perf_counter() - start)"
)


def _seconds(program: str, **variables: str) -> float:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COMMWATCH_")}
    finished = subprocess.run(
        [sys.executable, "-c", program], env={**clean, **variables}, capture_output=True, text=True, check=True
    )
    return float(finished.stdout)


def rows() -> Iterator[str]:
    """Medians of pairs, and of what the entry point itself takes."""
    off, on, hook = [], [], []
    for _ in range(PAIRS):
        off.append(_seconds(_PROGRAM, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
        on.append(_seconds(_PROGRAM))
        hook.append(_seconds(_HOOK, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    without, with_agent = statistics.median(off), statistics.median(on)
    yield f"import torch, recording off (median of {PAIRS} pairs)"
    yield f"  entry points off   {without:6.3f} s"
    yield f"  agent installed    {with_agent:6.3f} s   {with_agent / without:5.3f}x"
    yield f"  loading and calling the entry point alone   {1e3 * statistics.median(hook):6.3f} ms"
