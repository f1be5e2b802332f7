"""A git repository of two commits: the example job, and the same with one layout changed."""

from __future__ import annotations

import subprocess
from importlib.resources import files
from pathlib import Path

EXAMPLE = ("commwatch.agent.examples", "tensor_parallel")
GOOD = '"wo": Shard(1),'
CHANGED = '"wo": Shard(0),'
BRANCH = "main"


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=demo", "-c", "user.email=demo@example.invalid", "-c", "commit.gpgsign=false"]
    finished = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=30
    )
    return finished.stdout.strip()


def create(folder: Path) -> str:
    """Write the job and commit it. Returns the commit's hash."""
    folder.mkdir(parents=True)
    package, name = EXAMPLE
    for source in (files(package) / name).iterdir():
        if source.name.endswith(".py"):
            (folder / source.name).write_text(source.read_text())
    _git(folder, "init", "-q", "-b", BRANCH)
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "Train the gated transformer")
    return _git(folder, "rev-parse", "HEAD")


def change_layout(folder: Path) -> str:
    """Split one weight the other way and commit it: the loss stays right, the step communicates more."""
    model = folder / "model.py"
    text = model.read_text()
    if text.count(GOOD) != 1:
        raise ValueError(f"{model} does not hold {GOOD!r} exactly once: reinstall commwatch")
    model.write_text(text.replace(GOOD, CHANGED))
    _git(folder, "commit", "-q", "-a", "-m", "Split wo over its output features")
    return _git(folder, "rev-parse", "HEAD")
