"""The commit of a program: from variables, else from git, else from what CI systems set. Runs outside of the rank."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from commwatch.agent.settings import COMMIT

MAX_ANCESTORS = 200
MAX_BRANCH_CHARS = 200
MAX_SUBJECT_CHARS = 200
BUDGET_S = 10.0
"""Time all git commands may take together; what is not known by then stays unknown."""

_BRANCH = re.compile(r"\S.*")
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


_GIT_VARIABLES = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # what a partial clone lacks is not fetched
    "LC_ALL": "C",
}
# The checkout may belong to another user: only its history is read, and no program it names may run.
_SAFE = (
    *("-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}"),
    *("-c", "log.showSignature=false", "-c", "i18n.logOutputEncoding=UTF-8"),
)


class _Git:
    def __init__(self, root: Path, environ: Mapping[str, str], budget_s: float) -> None:
        self._root = root
        # A job that was started by a hook of git inherits variables that name another repository.
        inherited = {name: value for name, value in environ.items() if not name.startswith("GIT_")}
        self._environ = {**inherited, **_GIT_VARIABLES}
        self._deadline = time.monotonic() + budget_s

    def __call__(self, *arguments: str) -> str | None:
        """Output of a git command; None when it failed or the time is used up."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return None
        try:
            finished = subprocess.run(
                ["git", *_SAFE, *arguments],
                cwd=self._root,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
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
    # ^{commit} makes git look the object up: a full hash alone is taken to exist.
    known = git("rev-parse", "--verify", "--quiet", f"{configured}^{{commit}}") or "" if configured and head else head
    found = Commit(sha=known or configured or _first(environ, _CI_COMMIT, COMMIT))
    if head and found.sha == head:
        # A submodule at another commit is a difference; files within it are its own repository's business.
        status = git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
        found = replace(found, dirty=bool(status))
    branch = environ.get("COMMWATCH_BRANCH", "").strip() or git("symbolic-ref", "--quiet", "--short", "HEAD")
    branch = branch or _first(environ, _CI_BRANCH, _BRANCH).removeprefix("origin/")
    found = replace(found, branch=branch[:MAX_BRANCH_CHARS])
    if known:
        history = git("log", "--first-parent", f"--max-count={MAX_ANCESTORS + 1}", "--format=%H", known, "--")
        subject = git("log", "--max-count=1", "--format=%s", known, "--")
        ancestors = tuple((history or "").split())[1 : MAX_ANCESTORS + 1]
        found = replace(found, ancestors=ancestors, subject=(subject or "")[:MAX_SUBJECT_CHARS])
    return found


def _first(environ: Mapping[str, str], variables: tuple[str, ...], form: re.Pattern[str]) -> str:
    values = (environ.get(name, "").strip() for name in variables)
    return next((value for value in values if form.fullmatch(value)), "")
