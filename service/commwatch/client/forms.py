"""Types of the answers. ``docs/json.md`` says what each field means."""

from __future__ import annotations

from typing import Literal, TypedDict


class Fraction(TypedDict):
    """A ratio in lowest terms."""

    numerator: int
    denominator: int


class Bytes(TypedDict):
    """Payload bytes: exact, a mean, or withheld."""

    bytes: int | None
    mean: Fraction | None
    reason: str | None
    text: str


class Reason(TypedDict):
    """Why there is no number or no verdict."""

    code: str
    message: str


class MeshDimension(TypedDict):
    """One dimension of a device mesh."""

    name: str
    size: int


class Environment(TypedDict):
    """What must be equal for a fair comparison."""

    torch_version: str
    backend: str
    device_type: str
    world_size: int
    mesh: list[MeshDimension]
    compile_mode: str


class Accepted(TypedDict):
    """Who made a run a baseline, and why."""

    reason: str
    author: str
    unix_ns: int


class Run(TypedDict):
    """One run."""

    id: str
    short_id: str
    project: str
    workload: str
    commit: str
    subject: str
    branch: str
    dirty: bool
    script: str
    state: Literal["running", "complete", "lost"]
    attempt: int
    world_size: int
    expected_ranks: int
    environment: Environment | None
    started_unix_ns: int
    last_seen_unix_ns: int
    ended_unix_ns: int | None
    steps: int
    calls: int
    open_alerts: int
    accepted: Accepted | None


class ListedRun(Run):
    """One run of a list."""

    calls_per_step: int | None


class Runs(TypedDict):
    """A page of runs."""

    version: int
    runs: list[ListedRun]
    next_offset: int | None


class Rank(TypedDict):
    """One rank of the newest attempt."""

    rank: int
    hostname: str
    pid: int
    state: Literal["live", "clean", "exception", "lost"]
    detail: str
    steps: int
    calls: int
    stored_steps: int
    dropped_calls: int
    dropped_steps: int
    rejected_frames: int
    acked_frame: int
    last_seen_unix_ns: int
    expected_calls: int | None
    unverified_calls: int | None
    unattributed_calls: int | None
    recording_ns: int | None
    elapsed_ns: int | None
    completeness: RankCompleteness | None


class Group(TypedDict):
    """A process group."""

    name: str
    size: int
    stride: int


class GroupCompleteness(TypedDict):
    """Calls of one group of one rank."""

    group: Group
    recorded: int
    expected: int | None
    source: str | None


class RankCompleteness(TypedDict):
    """What one rank recorded against what a second source counted."""

    step: int
    unattributed: int
    unequal_steps: int
    first_unequal_step: int | None
    graph_calls: int
    groups: list[GroupCompleteness]


class Unverified(TypedDict):
    """Recorded calls of a group without a second source."""

    group: Group
    recorded: int


class GroupDifference(TypedDict):
    """A group of one rank whose recorded calls are not the expected ones."""

    rank: int
    group: Group
    recorded: int
    expected: int


class UnequalSteps(TypedDict):
    """Steps of one rank at whose end a difference had changed."""

    rank: int
    steps: int
    first_step: int


class GraphCalls(TypedDict):
    """Calls one rank captured into CUDA graphs."""

    rank: int
    calls: int


class Completeness(TypedDict):
    """The same over the ranks of a run."""

    ranks: list[int]
    silent_ranks: list[int]
    recorded: int
    expected: int
    unattributed: int
    unverified: list[Unverified]
    different: list[GroupDifference]
    unequal: list[UnequalSteps]
    graphs: list[GraphCalls]


class Cost(TypedDict):
    """What recording took."""

    ranks: int
    steps: int
    recording_ns: int
    elapsed_ns: int
    ns_per_step: Fraction
    part_of_step: Fraction
    text: str


class CapturedAt(TypedDict):
    """A step, and the ranks that captured it."""

    step: int
    ranks: list[int]


class Cause(TypedDict):
    """The redistribute behind a call."""

    src: str
    dst: str
    implicit: bool
    op: str


class Line(TypedDict):
    """One line of the user's program."""

    file: str
    line: int
    function: str


class Site(TypedDict):
    """A call's identity over ranks and commits."""

    site: str
    phase: str
    kind: str
    group: Group
    module: str
    cause: Cause | None
    dtype: str


class SteadySite(Site):
    """One site in one ordinary step."""

    calls: int
    ranks: int
    min_calls: int
    max_calls: int
    payload: Bytes
    modules: int
    raw_ops: list[str]
    lines: list[Line]


class RankClass(TypedDict):
    """Ranks that did the same."""

    ranks: list[int]
    pattern: str
    steps: int


class LeftOut(TypedDict):
    """What equal ranks did beside their steady pattern."""

    ranks: list[int]
    warm_up_steps: int
    other_steps: int
    other_patterns: int
    unordered_steps: int
    unfinished: bool
    unstored_steps: int


class Steady(TypedDict):
    """One ordinary step of a run."""

    calls: int
    payload: Bytes
    classes: list[RankClass]
    sites: list[SteadySite]
    left_out: list[LeftOut]
    modules_known: bool


class Compared(TypedDict):
    """The newest comparison the service made by itself."""

    base_run: str | None
    verdict: str
    reason: str


# One transition of an alert; "from" is a keyword, hence this form.
AlertEvent = TypedDict("AlertEvent", {"unix_ns": int, "from": str, "to": str, "author": str, "reason": str})


class Alert(TypedDict):
    """One alert."""

    id: str
    fingerprint: str
    project: str
    workload: str
    state: Literal["open", "accepted", "resolved"]
    run: str
    base_run: str
    title: str
    opened_unix_ns: int
    change: dict[str, object]
    events: list[AlertEvent]


class Alerts(TypedDict):
    """A list of alerts."""

    version: int
    alerts: list[Alert]


class Report(TypedDict):
    """One run, with everything there is to say about it."""

    version: int
    run: Run
    ranks: list[Rank]
    steady: Steady | None
    reasons: list[Reason]
    compared: Compared | None
    alerts: list[Alert]
    completeness: Completeness | None
    cost: Cost | None
    captured: list[CapturedAt]


class ScaledSite(Site):
    """One site that differs."""

    change: Literal["added", "removed", "count", "bytes"]
    sentence: str
    effect: str
    base_calls: int
    head_calls: int
    delta_calls: int
    delta_per_rank: int | None
    delta_per_layer: int | None
    layers: int
    ranks: int
    of_ranks: int
    base_payload: Bytes
    head_payload: Bytes
    delta_bytes: int | None
    base_modules: int
    head_modules: int
    base_instances: int | None
    head_instances: int | None
    lines: list[Line]


class Change(ScaledSite):
    """One change with its severity."""

    severity: Literal["alert", "warn", "info"]


class Payload(TypedDict):
    """Payload of a whole step in both runs."""

    severity: Literal["alert", "info"]
    sentence: str
    base: Bytes
    head: Bytes
    unexplained: Fraction | None


class BothLeftOut(TypedDict):
    """What is not part of a comparison."""

    base: list[LeftOut]
    head: list[LeftOut]


class Comparison(TypedDict):
    """Two runs and how they differ."""

    version: int
    verdict: Literal["same", "changed", "regression", "no_verdict"]
    reasons: list[Reason]
    base: Run | None
    base_reason: str
    head: Run | None
    base_calls: int | None
    head_calls: int | None
    payload: Payload | None
    changes: list[Change]
    scaled: list[ScaledSite]
    left_out: BothLeftOut


class Gate(Comparison):
    """A comparison, and what a gate makes of it."""

    strict: bool
    exit_code: int
    accept_command: str | None


class Acceptance(TypedDict):
    """A run that is a baseline now."""

    version: int
    run: Run
    accepted_alerts: list[Alert]
