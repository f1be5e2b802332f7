"""Runs, their environment and state, as readers see them."""

from __future__ import annotations

from dataclasses import dataclass

from commwatch.service.domain.records import Completeness, Facts, MeshDimension, StepRange

RUN_STATES = ("running", "complete", "lost")
"""running: some rank still reports. complete: every rank of the newest attempt said a clean goodbye.
lost: a rank of it was lost or ended with an exception, or never said hello although others ended."""

RANK_STATES = ("live", "clean", "exception", "lost")


@dataclass(frozen=True, slots=True)
class Environment:
    """What must be equal for a fair comparison."""

    torch_version: str
    backend: str
    device_type: str
    world_size: int
    mesh: tuple[MeshDimension, ...]
    compile_mode: str


@dataclass(frozen=True, slots=True)
class Run:
    """One launch at one commit. Times are Unix nanoseconds; ``ended_unix_ns`` is None while it runs.

    ``environment`` is merged over the ranks of the newest attempt; None until a rank reported its facts.
    ``accepted_reason`` is None unless someone made the run a baseline. ``reporting_ranks`` is below world_size where
    one process stands for all ranks; 0 means world_size.
    """

    id: str
    project: str
    workload: str
    commit_sha: str
    commit_subject: str
    branch: str
    dirty: bool
    script: str
    state: str
    attempt: int
    world_size: int
    environment: Environment | None
    started_unix_ns: int
    last_seen_unix_ns: int
    ended_unix_ns: int | None
    steps: int
    calls: int
    open_alerts: int
    accepted_reason: str | None
    accepted_by: str | None
    accepted_unix_ns: int | None
    reporting_ranks: int = 0

    @property
    def expected_ranks(self) -> int:
        """How many ranks must report before the run is whole."""
        return self.reporting_ranks or self.world_size


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of one attempt. ``steps`` and ``calls`` are its own counters, ``stored_*`` what its ranges hold.

    Counters that are None, like ``completeness``, were never reported. See ``records.Progress``.
    """

    run_id: str
    attempt: int
    rank: int
    hostname: str
    pid: int
    state: str
    detail: str
    acked_frame: int
    steps: int
    calls: int
    stored_steps: int
    dropped_calls: int
    dropped_steps: int
    rejected_frames: int
    facts: Facts | None
    last_seen_unix_ns: int
    expected_calls: int | None = None
    unverified_calls: int | None = None
    unattributed_calls: int | None = None
    recording_ns: int | None = None
    elapsed_ns: int | None = None
    completeness: Completeness | None = None


@dataclass(frozen=True, slots=True)
class RankRanges:
    """The step ranges of one rank of the newest attempt, by number."""

    rank: int
    ranges: tuple[StepRange, ...]
