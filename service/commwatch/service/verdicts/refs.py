"""What a name means: a run id or its prefix, a commit prefix, a branch, or ``branch~n``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from commwatch.service.domain.runs import Run
from commwatch.service.domain.wording import short_id
from commwatch.service.store.contract import Store

MIN_PREFIX = 4
"""Characters of a run id or a commit that a prefix must have."""
MAX_MATCHES = 5
MAX_RUNS_AT_REF = 200
"""Runs of one commit that are looked at, newest first."""
MAX_REF_LENGTH = 255
MAX_HEADS = 10
"""Commits of a branch's newest runs among which its head is looked for."""

_HEXADECIMAL = re.compile(r"[0-9a-fA-F-]+")
_ANCESTOR = re.compile(r"(?P<branch>.+)~(?P<number>\d{1,6})?")
_FULL_SHA_LENGTH = 40


class RefError(Exception):
    """Root of what can be wrong with a name, ``ref``. ``matches`` are what to type instead, nearest first."""

    def __init__(self, message: str, matches: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ref = ""
        self.message = message
        self.matches = list(matches)[:MAX_MATCHES]


class UnknownRefError(RefError):
    """Nothing has that name."""


class AmbiguousRefError(RefError):
    """Several things have that name."""


class NoRunError(RefError):
    """The commit is known, but no run of it, or none of the workload."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The runs a name stands for, newest first, all of one workload; at least one."""

    ref: str
    runs: tuple[Run, ...]

    @property
    def newest(self) -> Run:
        """The newest complete run, else the newest."""
        return next((run for run in self.runs if run.state == "complete"), self.runs[0])


def resolve(store: Store, project: str, ref: str, workload: str | None = None) -> Run:
    """The newest complete run a name stands for, else the newest. Raises RefError."""
    return find(store, project, ref, workload).newest


def find(store: Store, project: str, ref: str, workload: str | None = None) -> Resolved:
    """Every run a name stands for. Raises RefError; AmbiguousRefError when they are of several workloads."""
    try:
        return _find(store, project, ref, workload)
    except RefError as error:
        error.ref = ref
        raise


def _find(store: Store, project: str, ref: str, workload: str | None) -> Resolved:
    if not ref or len(ref) > MAX_REF_LENGTH:
        raise UnknownRefError(f"A run, commit or branch has 1 to {MAX_REF_LENGTH} characters.")
    run = store.run(ref.lower())
    if run is None or run.project != project:
        run = None
        commits = _commits_of_branch(store, project, ref)
        if not commits:
            run, commits = _by_prefix(store, project, ref)
        if run is None:
            return _of_one_workload(ref, _runs_of(store, project, commits, workload))
    if workload is not None and run.workload != workload:
        raise UnknownRefError(f"Run {short_id(run.id)} is of workload {run.workload}, not {workload}.", [run.workload])
    return Resolved(ref, (run,))


def _commits_of_branch(store: Store, project: str, ref: str) -> list[str]:
    """Commits a branch or ``branch~n`` may stand for, in the order to try; empty when it names no branch."""
    heads = _heads(store, project, ref)
    if heads:
        return heads
    match = _ANCESTOR.fullmatch(ref)
    if match is None:
        return []
    heads = _heads(store, project, match["branch"])
    if not heads:
        return []
    number = int(match["number"] or 1)
    if number == 0:
        return heads
    ancestors = store.first_parents(project, heads[0], number)
    if len(ancestors) < number:
        raise UnknownRefError(
            f"Only {len(ancestors)} ancestors of {match['branch']} at {heads[0][:8]} are known.",
            [f"{match['branch']}~{len(ancestors)}"] if ancestors else [match["branch"]],
        )
    return [ancestors[number - 1]]


def _heads(store: Store, project: str, branch: str) -> list[str]:
    """Commits of a branch's newest runs, its head first: a newer run of an older commit does not move it back."""
    heads = store.branch_heads(project, branch)
    head = heads[0] if heads else ""
    for sha in heads[1:MAX_HEADS]:
        if head in store.first_parents(project, sha):
            head = sha
    return [head, *(sha for sha in heads if sha != head)] if heads else []


def _by_prefix(store: Store, project: str, ref: str) -> tuple[Run | None, list[str]]:
    """The one run or the one commit whose name starts with ``ref``."""
    if len(ref) < MIN_PREFIX or _HEXADECIMAL.fullmatch(ref) is None:
        raise _unknown(store, project, ref)
    prefix = ref.lower()
    found = [store.run(run_id) for run_id in store.run_ids(prefix)]
    runs = [run for run in found if run is not None and run.project == project]
    shas = store.commit_shas(project, prefix) if len(prefix) <= _FULL_SHA_LENGTH else []
    if len(runs) + len(shas) > 1:
        names = [short_id(run.id) for run in runs] + [sha[:12] for sha in shas]
        raise AmbiguousRefError(f"{ref} is the start of {len(names)} names.", names)
    if not runs and not shas:
        raise _unknown(store, project, ref)
    return (runs[0], []) if runs else (None, shas)


def _runs_of(store: Store, project: str, commits: Sequence[str], workload: str | None) -> list[Run]:
    """Runs of the first of the commits that has any of the workload."""
    for sha in commits:
        found = store.runs(project=project, commit_sha=sha, workload=workload, limit=MAX_RUNS_AT_REF)
        if found:
            return found
    of = f" of workload {workload}" if workload is not None else ""
    raise NoRunError(f"Commit {commits[0][:12]} is known, but no run{of} started from it.")


def _of_one_workload(ref: str, runs: Sequence[Run]) -> Resolved:
    workloads = sorted({run.workload for run in runs})
    if len(workloads) > 1:
        raise AmbiguousRefError(
            f"Several workloads ran at {ref}: {', '.join(workloads)}. Name one with --workload.", workloads
        )
    return Resolved(ref, tuple(runs))


def _unknown(store: Store, project: str, ref: str) -> UnknownRefError:
    workloads, branches = store.names(project)
    if not workloads:
        return UnknownRefError(f"Project {project} has no runs.")
    recent = store.runs(project=project, limit=MAX_RUNS_AT_REF)
    shas = dict.fromkeys(run.commit_sha[: max(len(ref), 8)] for run in recent if run.commit_sha)
    ids = dict.fromkeys(run.id[: max(len(ref), 13)] for run in recent)
    names = {name.lower(): name for name in (*branches, *shas, *ids, *workloads)}
    near = get_close_matches(ref.lower(), names, n=MAX_MATCHES, cutoff=0.5)
    message = f"No run, commit or branch of project {project} is called {ref}."
    if ref in workloads:
        message = f"{ref} is a workload: name a run, commit or branch, and give --workload {ref}."
    return UnknownRefError(message, [names[name] for name in near] or branches)
