"""What ranks report, as the service holds it. Source: proto/commwatch/v1, read by ``ingest`` alone.

Hashes are 32 lower-case hexadecimal characters (BLAKE2b-128). Sizes are in bytes, steps count from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commwatch.service.domain.captures import Capture

KINDS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
    "unknown",
)
PHASES = ("forward", "backward", "recompute", "optimizer", "clip", "checkpoint", "eval", "other")


@dataclass(frozen=True, slots=True)
class Group:
    """A process group in terms equal on every rank and commit: mesh dimension or description, size, rank stride."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Cause:
    """The DTensor redistribute behind a call. ``op`` is empty when it was explicit."""

    src: str
    dst: str
    implicit: bool
    op: str


@dataclass(frozen=True, slots=True)
class Call:
    """One distinct collective of a pattern. ``module`` keeps its layer numbers; empty when none is known."""

    phase: str
    kind: str
    raw_op: str
    group: Group
    module: str
    cause: Cause | None
    dtype: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """The calls of one step: ``order`` holds indices into ``calls``; empty when ``unordered``."""

    hash: str
    calls: tuple[Call, ...]
    order: tuple[int, ...]
    unordered: bool = False


@dataclass(frozen=True, slots=True)
class CallShapes:
    """Sizes of the tensors of one call, per rank."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    bytes_in: int
    bytes_out: int

    @property
    def payload_bytes(self) -> int:
        """The larger of input and output: the "size" of nccl-tests for every kind."""
        return max(self.bytes_in, self.bytes_out)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes for each position of a pattern's order: ``order`` holds indices into ``shapes``."""

    hash: str
    pattern_hash: str
    shapes: tuple[CallShapes, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the user's program."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Lines:
    """For each call of a pattern, up to four lines it came from at one commit."""

    hash: str
    pattern_hash: str
    calls: tuple[tuple[Line, ...], ...]


@dataclass(frozen=True, slots=True)
class Modules:
    """How many modules of one rank's model share a folded name, sorted by name."""

    hash: str
    counts: tuple[tuple[str, int], ...]


Definition = Pattern | Shapes | Lines | Modules


@dataclass(frozen=True, slots=True)
class BytesStatistics:
    """Payload bytes of one call of a pattern over the steps of a range whose shapes vary."""

    call: int
    count: int
    sum: int
    min: int
    max: int


@dataclass(frozen=True, slots=True)
class StepRange:
    """A rank ran one pattern for ``steps`` steps between first_step and last_step.

    ``shapes_hash`` is None when shapes vary: ``statistics`` then covers ``statistics_steps`` of the steps.
    A later range with the same number replaces this one.
    """

    number: int
    first_step: int
    last_step: int
    steps: int
    pattern_hash: str
    shapes_hash: str | None
    lines_hash: str | None
    statistics: tuple[BytesStatistics, ...] = ()
    statistics_steps: int = 0
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class MeshDimension:
    """One dimension of a device mesh."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank knows of its environment once it ran."""

    mesh: tuple[MeshDimension, ...]
    device_type: str
    backend: str
    compile_mode: str
    modules_hash: str | None


@dataclass(frozen=True, slots=True)
class GroupCompleteness:
    """Calls of one process group over the finished steps of a rank.

    ``expected`` is what the second source named ``source`` counted; None where the group has no second source.
    """

    group: Group
    recorded: int
    expected: int | None
    source: str


@dataclass(frozen=True, slots=True)
class Completeness:
    """What a rank recorded up to ``step`` against what a second source counted. A later one replaces this one.

    ``unattributed`` counts recorded calls without a module, in the phases that have modules. ``unequal_steps`` are the
    steps at whose end the difference of a group had changed; ``first_unequal_step`` is 0 without one. ``graph_calls``
    were captured into CUDA graphs, whose replays nobody counts: unless 0, all counts of the rank are a lower bound.
    """

    step: int
    groups: tuple[GroupCompleteness, ...]
    unattributed: int
    unequal_steps: int
    first_unequal_step: int
    graph_calls: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """One numbered record of a rank's stream."""

    number: int
    content: StepRange | Facts | Completeness | Capture


@dataclass(frozen=True, slots=True)
class Commit:
    """Where a run started from. ``sha`` is empty when unknown; ancestors are first parents, nearest first."""

    sha: str
    branch: str
    dirty: bool
    ancestors: tuple[str, ...]
    subject: str


@dataclass(frozen=True, slots=True)
class RankKey:
    """One rank of one attempt of one run: one stream."""

    run_id: str
    attempt: int
    rank: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Who reports. ``reporting_ranks`` is below world_size where one process stands for all; 0 means world_size."""

    key: RankKey
    project: str
    workload: str
    world_size: int
    commit: Commit
    hostname: str
    pid: int
    torch_version: str
    agent_version: str
    started_unix_ns: int
    script: str
    reporting_ranks: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters of a rank. They run ahead of its frames by the steps of the open range.

    ``expected_calls``, ``unverified_calls`` and ``unattributed_calls`` are None for an agent that has no second
    source of counts; ``recording_ns`` and ``elapsed_ns`` for one that does not measure its own cost.
    """

    range: int
    last_step: int
    range_steps: int
    steps: int
    calls: int
    dropped_calls: int
    dropped_steps: int
    reason: str
    expected_calls: int | None = None
    unverified_calls: int | None = None
    unattributed_calls: int | None = None
    recording_ns: int | None = None
    elapsed_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Goodbye:
    """How a rank ended: ``clean``, ``exception`` or ``lost``."""

    ending: str
    detail: str
    progress: Progress
