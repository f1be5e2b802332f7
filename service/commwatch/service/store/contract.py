"""What every store must do. This file is the specification; ``tests/contract`` runs it over each implementation.

Every method may be called from any thread; a store lets one writing method run at a time. Every method is one
transaction: it happened wholly or not at all, and what it stored survives the death of the process once it returned.
Methods raise ``StoreUnavailableError`` when the database cannot answer (retry later: nothing was stored).
``open_store`` raises ``SchemaError`` when the schema is not the one this release works with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from commwatch.service.domain.alerts import Alert, AlertEvent
from commwatch.service.domain.captures import CapturedStep, CaptureRequest, CaptureSummary
from commwatch.service.domain.records import Definition, Frame, Goodbye, Hello, Progress, RankKey
from commwatch.service.domain.runs import Rank, RankRanges, Run


class StoreError(Exception):
    """Root of the store's errors. The message says what happened and what to type next."""


class StoreUnavailableError(StoreError):
    """The database cannot answer now. Nothing was stored; the same call may succeed later."""


class SchemaError(StoreError):
    """The database's schema is older or newer than this release."""


class RequestRefusedError(StoreError):
    """A capture was asked for of a rank that never reported, or beyond a limit."""


@dataclass(frozen=True, slots=True)
class RejectedFrame:
    """A frame that was malformed: it takes its number, so that the stream goes on, and is counted."""

    number: int
    reason: str


@dataclass(slots=True)
class StreamWrite:
    """What one stream wants stored together. Frames are in order and start right after the stream's cursor."""

    key: RankKey
    project: str
    frames: list[Frame | RejectedFrame] = field(default_factory=list)
    definitions: list[Definition] = field(default_factory=list)
    progress: Progress | None = None
    goodbye: Goodbye | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """A run that a person made a baseline."""

    run_id: str
    reason: str
    author: str
    accepted_unix_ns: int


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What one rank is to capture and has not answered yet. ``sent``: it was written to a stream of the rank."""

    key: RankKey
    number: int
    steps: int
    sent: bool


class Store(Protocol):
    """Runs in SQL."""

    def close(self) -> None:
        """Release every connection. Idempotent."""

    # Writing

    def open_stream(self, hello: Hello, now_unix_ns: int) -> int:
        """Register project, workload, commit chain, run, attempt and rank, whichever are new; mark the rank live.

        Returns the number of the last frame stored for this rank and attempt, 0 for a new one. Idempotent. A rank
        that was lost and says hello again is live again; so is its run. A rank that ended otherwise keeps its state:
        it has nothing new to say. A higher attempt supersedes: from its first hello on, the run's state is that of
        the new attempt. Raises ValueError when the run belongs to another project; where ranks of one run differ in
        workload or script, the first to say hello counts. The commit is that of the first hello that names one: most
        ranks do not look for it.
        """

    def apply(self, writes: Sequence[StreamWrite], now_unix_ns: int) -> None:
        """Store what the streams sent, in one transaction, and advance each stream's cursor to its last frame.

        Frames at or below the cursor are ignored (a resend stores nothing twice). A frame that would leave a gap
        raises ValueError, and so does a rank without ``open_stream``: ``ingest`` never passes either. A StepRange
        replaces the range of the same number, but its steps never shrink. Definitions are insert-or-ignore by
        (project, hash). Every hash a range, Shapes or Lines refers to is already stored or among the ``definitions``
        of the same call. Progress never goes backwards, and grows the open range it names (``last_step`` and
        ``steps``; statistics keep the steps they cover); a counter that is None changes nothing. A Completeness
        replaces the rank's older one. Of a Capture each (step, part) is stored once. One that refuses its request is
        not stored: the request becomes refused, with the reason; once as many steps as it asked for came to their
        last part, it is captured. A goodbye sets the rank's state; when it was the last
        missing one, the run's state. Frames or progress of a rank that was marked lost make it live again.
        """

    def mark_lost(self, silent_since_unix_ns: int, now_unix_ns: int) -> list[RankKey]:
        """Mark live ranks that were last seen before ``silent_since_unix_ns`` lost, and close runs that ended by it.

        Runs whose ranks all ended, but fewer than are expected ever said hello, are closed as lost too,
        once the last sign of life is that old. Returns the ranks.
        """

    # Reading runs

    def runs(
        self,
        *,
        project: str | None = None,
        workload: str | None = None,
        commit_sha: str | None = None,
        branch: str | None = None,
        state: str | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> list[Run]:
        """Runs that match every filter given, newest first."""

    def run(self, run_id: str) -> Run | None:
        """One run by its full id."""

    def run_ids(self, prefix: str, limit: int = 10) -> list[str]:
        """Ids that start with prefix, newest first."""

    def ranks(self, run_id: str) -> list[Rank]:
        """Ranks of the newest attempt, by rank."""

    def ranges(self, run_id: str) -> list[RankRanges]:
        """Step ranges of the newest attempt, by rank. A rank without ranges has an empty element."""

    def definitions(self, project: str, hashes: Iterable[str]) -> dict[str, Definition]:
        """The bodies that are stored, by hash."""

    # Captures

    def captures(self, run_id: str) -> list[CaptureSummary]:
        """What is stored of the newest attempt's captured steps, by step and rank."""

    def capture(self, run_id: str, rank: int, step: int) -> CapturedStep | None:
        """One captured step of the newest attempt: its stored parts as one tree; None when there is none."""

    def stored_parts(self, key: RankKey) -> dict[int, dict[int, int]]:
        """Records of each stored part of a rank's captures, by step and part."""

    def ask_captures(self, run_id: str, ranks: Collection[int], steps: int, author: str, now_unix_ns: int) -> int:
        """Ask ranks of the newest attempt to capture so many steps each. Returns the number of the request.

        Numbers count from 1 in each run; the ranks asked together share one. Ranks that ended may be asked: theirs is
        missed at once. Raises KeyError for an unknown run, and RequestRefusedError for a rank that never said hello,
        for a run with MAX_OPEN_REQUESTS open requests, and after MAX_REQUESTS requests.
        """

    def capture_requests(self, run_id: str) -> list[CaptureRequest]:
        """Every request of a run with its state, by number and rank.

        A request is missed, and no longer open, while its rank is not live or its attempt is not the newest: a rank
        that was lost and comes back may still answer.
        """

    def open_requests(self, run_ids: Collection[str]) -> list[OpenRequest]:
        """Requests of these runs that are neither captured nor refused, by run and number. One query."""

    def mark_sent(self, requests: Sequence[OpenRequest]) -> None:
        """Note that they were written to the streams of their ranks. Those answered meanwhile stay as they are."""

    # Reading commits

    def first_parents(self, project: str, sha: str, limit: int = 1000) -> list[str]:
        """First-parent ancestors of a commit as far as runs reported them, nearest first, without itself."""

    def commit_shas(self, project: str, prefix: str, limit: int = 10) -> list[str]:
        """Full hashes of commits that start with prefix, of any commit a run or an ancestor list named."""

    def branch_heads(self, project: str, branch: str) -> list[str]:
        """Commits of the newest runs of a branch, newest first, each once, at most 50."""

    def names(self, project: str) -> tuple[list[str], list[str]]:
        """All workloads and all branches of a project, sorted."""

    # Baselines and alerts

    def accept(self, run_id: str, reason: str, author: str, now_unix_ns: int) -> Baseline:
        """Make a run a baseline of its workload; the open alerts it shows become accepted.

        Idempotent: the first reason stays. Raises KeyError for an unknown run.
        """

    def baselines(self, project: str, workload: str) -> list[Baseline]:
        """Accepted runs, newest first."""

    def record_comparison(
        self,
        head_run_id: str,
        base_run_id: str | None,
        verdict: str,
        reason: str,
        alerts: Sequence[Alert],
        now_unix_ns: int,
    ) -> list[Alert]:
        """Store that a run was compared and open the alerts. Returns those opened.

        An alert whose (workload, fingerprint) is already open is not opened again: the head run is only noted as
        showing it. Neither is one that the head run showed before, whatever became of it. Equal comparisons
        (base, verdict and reason) in a row are stored once. Raises KeyError for an unknown run.
        """

    def compared(self, head_run_id: str) -> tuple[str | None, str, str] | None:
        """(base run, verdict, reason) of the newest recorded comparison of a run; None before the first."""

    def alerts(
        self, *, project: str | None = None, state: str | None = None, run_id: str | None = None, limit: int = 100
    ) -> list[Alert]:
        """Alerts that match every filter given, newest first. ``run_id`` names any run that showed the alert."""

    def alert_events(self, alert_id: str) -> list[AlertEvent]:
        """History of one alert, oldest first."""
