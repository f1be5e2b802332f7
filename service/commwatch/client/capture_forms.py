"""Types of the answers about captures. ``docs/json.md`` says what each field means."""

from __future__ import annotations

from typing import Literal, TypedDict

from commwatch.client.forms import Group, Line, Run, SteadySite


class CaptureSummary(TypedDict):
    """What is stored of one captured step of one rank."""

    rank: int
    step: int
    parts: int
    whole: bool
    request: int | None
    records: int
    collectives: int
    dropped_records: int
    reason: str
    stored_unix_ns: int


class CaptureRequest(TypedDict):
    """What one rank was asked to capture, and what became of it."""

    number: int
    attempt: int
    rank: int
    steps: int
    asked_by: str
    asked_unix_ns: int
    state: Literal["asked", "sent", "captured", "refused", "missed"]
    reason: str
    captured_steps: list[int]


class Captures(TypedDict):
    """What was captured of a run, and what was asked for."""

    version: int
    run: Run
    captures: list[CaptureSummary]
    requests: list[CaptureRequest]


class CaptureRequests(TypedDict):
    """What was asked for just now."""

    version: int
    run: Run
    requests: list[CaptureRequest]


class CapturedTensor(TypedDict):
    """A tensor without its values."""

    type: str
    dtype: str
    shape: list[int]
    placements: str
    mesh: list[int]
    id: int | None


class CapturedValue(TypedDict, total=False):
    """An argument or output: ``name``, and one of the others."""

    name: str
    tensor: CapturedTensor
    text: str
    list: list[CapturedValue]


class CapturedRedistribute(TypedDict):
    """A redistribute, or the decision to make one."""

    argument: int | None
    src: str
    dst: str
    trace: str
    implicit: bool


class CapturedCollective(TypedDict):
    """A collective that a record issued."""

    kind: str
    group: Group
    phase: str
    module: str


class CapturedCall(TypedDict):
    """One distinct record without its place."""

    kind: str
    name: str
    arguments: list[CapturedValue]
    outputs: list[CapturedValue]
    redistribute: CapturedRedistribute | None
    collectives: list[CapturedCollective]


class CapturedRecord(TypedDict):
    """One node of the tree."""

    depth: int
    call: int
    line: int | None
    position: int | None
    output_hash: str | None


class Capture(TypedDict):
    """One captured step of one rank."""

    version: int
    run: Run
    capture: CaptureSummary
    calls: list[CapturedCall]
    lines: list[Line]
    records: list[CapturedRecord]


class Link(TypedDict):
    """One link of the chain behind a site."""

    link: Literal["line", "module", "op", "redistribute", "collective", "step"]
    text: str


class PathRecord(TypedDict):
    """One record of a path."""

    depth: int
    text: str


class Path(TypedDict):
    """Where a capture shows the first call of a site."""

    rank: int
    step: int
    records: list[PathRecord]


class Explanation(TypedDict):
    """Why the calls of one site are there."""

    version: int
    run: Run
    site: SteadySite
    chain: list[Link]
    remedy: str | None
    path: Path | None
