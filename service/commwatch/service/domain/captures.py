"""Captures: everything a rank ran in one step, as a tree. Source: proto/commwatch/v1, read by ``ingest`` alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from commwatch.service.domain.records import Group, Line

CAPTURED_KINDS = (
    "torch_function",
    "dtensor_op",
    "redistribute",
    "output_placements",
    "op",
    "fake_op",
    "local_tensor_op",
    "async_op",
    "triton_kernel",
    "region",
    "module",
    "record_function",
    "annotation",
)
"""In the order of the wire's numbers, from 1."""

REQUEST_STATES = ("asked", "sent", "captured", "refused", "missed")
"""asked: stored. sent: written to the rank's stream. captured: every step of it is stored. refused: the rank said why
not. missed: the rank ended first."""

MAX_RECORDS = 200_000
"""Records of one captured step, all parts together."""
MAX_CAPTURED_STEPS = 1_000
"""Captured steps of one rank."""
MAX_REQUEST_STEPS = 16
"""Steps one request may ask for."""
MAX_REQUEST_RANKS = 64
"""Ranks one request may ask."""
MAX_OPEN_REQUESTS = 8
"""Requests of one run that some live rank has not answered."""
MAX_REQUESTS = 1_000
"""Requests of one run, whatever became of them."""


@dataclass(frozen=True, slots=True)
class CapturedTensor:
    """A tensor without its values. ``type`` is "t", "dt" or "ft"; ``id`` is 0 where ids were not asked for."""

    type: str
    dtype: str
    shape: tuple[int, ...]
    placements: str
    mesh: tuple[int, ...]
    id: int


@dataclass(frozen=True, slots=True)
class CapturedValue:
    """An argument or output: a tensor, text, or several values. ``name`` is empty unless it is a keyword argument."""

    name: str
    value: CapturedTensor | str | tuple[CapturedValue, ...]


@dataclass(frozen=True, slots=True)
class CapturedRedistribute:
    """The decision of op dispatch about one ``argument``, or, where that is None, the redistribute itself."""

    argument: int | None
    src: str
    dst: str
    trace: str
    implicit: bool


@dataclass(frozen=True, slots=True)
class CapturedCollective:
    """A collective as level ``collectives`` recorded it. ``module`` keeps its layer numbers; empty when unknown."""

    kind: str
    group: Group
    phase: str
    module: str


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """One distinct record without its place. ``kind`` is one of CAPTURED_KINDS."""

    kind: str
    name: str
    arguments: tuple[CapturedValue, ...] = ()
    outputs: tuple[CapturedValue, ...] = ()
    redistribute: CapturedRedistribute | None = None
    collectives: tuple[CapturedCollective, ...] = ()


@dataclass(frozen=True, slots=True)
class CapturedRecord:
    """A node. Its parent is the nearest record before it that is less deep.

    ``call`` and ``line`` are indices, ``line`` None when unknown. ``position`` counts collectives of the step from 1,
    in the order of issue; None when it issued none.
    """

    depth: int
    call: int
    line: int | None = None
    position: int | None = None
    output_hash: str = ""


@dataclass(frozen=True, slots=True)
class Capture:
    """One part of a captured step, with its own ``calls`` and ``lines``. ``request`` is 0 where settings asked for it.

    A first part that answers a request with a reason and without a single record refuses it.
    """

    step: int
    part: int
    last_part: bool
    request: int
    calls: tuple[CapturedCall, ...]
    lines: tuple[Line, ...]
    records: tuple[CapturedRecord, ...]
    dropped_records: int = 0
    reason: str = ""

    @property
    def refuses(self) -> bool:
        """The rank could not capture what a request asked for."""
        return self.request > 0 and self.part == 1 and not self.records and self.reason != ""

    @property
    def collectives(self) -> int:
        """Collectives of its records."""
        counts = [len(call.collectives) for call in self.calls]
        return sum(counts[record.call] for record in self.records)


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """What is stored of one step of one rank. ``whole`` is False while parts are missing."""

    rank: int
    step: int
    parts: int
    whole: bool
    request: int
    records: int
    collectives: int
    dropped_records: int
    reason: str
    stored_unix_ns: int


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The joined parts of one step of one rank."""

    summary: CaptureSummary
    calls: tuple[CapturedCall, ...]
    lines: tuple[Line, ...]
    records: tuple[CapturedRecord, ...]


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What one rank was asked for. ``number`` is shared by the ranks asked together and unique in the run.

    ``captured_steps`` are the steps that were wholly stored for it. ``reason`` says why it was refused or missed.
    """

    number: int
    attempt: int
    rank: int
    steps: int
    asked_by: str
    asked_unix_ns: int
    state: str
    reason: str
    captured_steps: tuple[int, ...]


def join(summary: CaptureSummary, parts: Sequence[Capture]) -> CapturedStep:
    """One tree from the parts of a step, in the order of their numbers."""
    calls: list[CapturedCall] = []
    lines: list[Line] = []
    records: list[CapturedRecord] = []
    for part in parts:
        records.extend(_shifted(record, len(calls), len(lines)) for record in part.records)
        calls.extend(part.calls)
        lines.extend(part.lines)
    return CapturedStep(summary, tuple(calls), tuple(lines), tuple(records))


def _shifted(record: CapturedRecord, calls: int, lines: int) -> CapturedRecord:
    if not calls and not lines:
        return record
    line = None if record.line is None else record.line + lines
    return replace(record, call=record.call + calls, line=line)
