"""The commit of a program: from variables, else from git, else from what CI systems set. Runs outside of the rank."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

MAX_ANCESTORS = 200
BUDGET_S = 10.0
"""Time all git commands may take together; what is not known by then stays unknown."""

_CI_COMMIT = ("GITHUB_SHA", "CI_COMMIT_SHA", "GIT_COMMIT", "BUILDKITE_COMMIT", "CIRCLE_SHA1")
_CI_BRANCH = (
    "GITHUB_HEAD_REF",
    "GITHUB_REF_NAME",
    "CI_COMMIT_REF_NAME",
    "CHANGE_BRANCH",
    "BRANCH_NAME",
    "GIT_BRANCH",
    "BUILDKITE_BRANCH",
    "CIRCLE_BRANCH",
)
"""GitHub Actions, GitLab CI, Jenkins, Buildkite, CircleCI. For a pull request GitHub checks out the merge commit, and
its head's name stands in GITHUB_HEAD_REF."""


@dataclass(frozen=True, slots=True)
class Commit:
    """``sha`` is empty when unknown. ``ancestors`` are first parents, nearest first."""

    sha: str = ""
    branch: str = ""
    dirty: bool = False
    ancestors: tuple[str, ...] = ()
    subject: str = ""


class _Git:
    def __init__(self, root: Path, environ: Mapping[str, str], budget_s: float) -> None:
        self._root = root
        self._environ = {**environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        self._deadline = time.monotonic() + budget_s

    def __call__(self, *arguments: str) -> str | None:
        """Output of a git command; None when it failed or the time is used up."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return None
        # The checkout may belong to another user: only its history is read, and no hook of it may run.
        safe = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
        try:
            finished = subprocess.run(
                ["git", *safe, *arguments],
                cwd=self._root,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=left,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return finished.stdout.strip() if finished.returncode == 0 else None


def describe_commit(root: Path, environ: Mapping[str, str], *, budget_s: float = BUDGET_S) -> Commit:
    """The commit of the checkout at ``root``. Never raises."""
    git = _Git(root, environ, budget_s)
    head = git("rev-parse", "--verify", "HEAD") or ""
    configured = environ.get("COMMWATCH_COMMIT", "").strip()
    sha = git("rev-parse", "--verify", f"{configured}^{{commit}}") or configured if configured else head
    found = Commit(sha=sha or _first(environ, _CI_COMMIT))
    if head:
        status = git("status", "--porcelain", "--untracked-files=no")
        found = replace(found, dirty=bool(status) and sha == head)
    branch = environ.get("COMMWATCH_BRANCH", "").strip() or git("symbolic-ref", "--quiet", "--short", "HEAD")
    found = replace(found, branch=(branch or _first(environ, _CI_BRANCH)).removeprefix("origin/"))
    if found.sha and head:
        history = git("log", "--first-parent", f"--max-count={MAX_ANCESTORS + 1}", "--format=%H", found.sha, "--")
        subject = git("log", "--max-count=1", "--format=%s", found.sha, "--")
        ancestors = tuple((history or "").split())[1 : MAX_ANCESTORS + 1]
        found = replace(found, ancestors=ancestors, subject=(subject or "")[:200])
    return found


def _first(environ: Mapping[str, str], variables: tuple[str, ...]) -> str:
    return next((environ[name].strip() for name in variables if environ.get(name, "").strip()), "")
