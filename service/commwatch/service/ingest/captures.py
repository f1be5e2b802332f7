"""Reads captures: the tree of one step, or a part of it. Raises MalformedError."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from commwatch.service.domain.captures import (
    CAPTURED_KINDS,
    MAX_CAPTURED_STEPS,
    MAX_RECORDS,
    Capture,
    CapturedCall,
    CapturedCollective,
    CapturedRecord,
    CapturedRedistribute,
    CapturedTensor,
    CapturedValue,
)
from commwatch.service.domain.records import KINDS, PHASES
from commwatch.service.ingest.bodies import read_group, read_line
from commwatch.service.ingest.checks import (
    MAX_CALL_COLLECTIVES,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    MAX_NESTING,
    MAX_PARTS,
    MAX_POSITIONS,
    MAX_VALUES,
    NAME_CHARS,
    PATH_CHARS,
    VALUE_CHARS,
    MalformedError,
    at_most,
    big,
    name,
    one_of,
    require,
    sentence,
    small,
)
from commwatch.v1 import records_pb2


def read_capture(message: records_pb2.Capture) -> Capture:
    """One part. Whether its step is within the limits of all parts together is for ``CaptureLimits`` to say."""
    at_most(message.records, MAX_RECORDS, "records in a capture")
    at_most(message.calls, MAX_RECORDS, "distinct records in a capture")
    at_most(message.lines, MAX_RECORDS, "lines in a capture")
    request = big(message.request, "the request of a capture")
    answers = request > 0 and not message.records and message.reason != ""
    # A refusal may come before the first step.
    require(message.step >= 1 or answers, "a capture of step 0")
    require(1 <= message.part <= MAX_PARTS, f"part {message.part} of a capture, not one of 1 to {MAX_PARTS}")
    calls, lines = len(message.calls), len(message.lines)
    return Capture(
        step=big(message.step, "the step of a capture"),
        part=message.part,
        last_part=message.last_part,
        request=request,
        calls=tuple(_call(call) for call in message.calls),
        lines=tuple(read_line(line) for line in message.lines),
        records=tuple(_record(record, calls, lines) for record in message.records),
        dropped_records=big(message.dropped_records, "dropped records"),
        reason=sentence(message.reason),
    )


def _record(message: records_pb2.CapturedRecord, calls: int, lines: int) -> CapturedRecord:
    if message.depth > MAX_DEPTH:
        raise MalformedError(f"a record has the depth {message.depth}, more than {MAX_DEPTH}")
    if message.call >= calls:
        raise MalformedError(f"a record refers to call {message.call} of {calls}")
    if message.line > lines:
        raise MalformedError(f"a record refers to line {message.line} of {lines}")
    if message.position > MAX_POSITIONS:
        raise MalformedError(f"a record has the position {message.position}, more than {MAX_POSITIONS}")
    return CapturedRecord(
        depth=message.depth,
        call=message.call,
        line=message.line - 1 if message.line else None,
        position=message.position or None,
        output_hash=name(message.output_hash, "the hash of outputs", NAME_CHARS),
    )


def _call(message: records_pb2.CapturedCall) -> CapturedCall:
    require(1 <= message.kind <= len(CAPTURED_KINDS), f"a record has the unknown kind {message.kind}")
    at_most(message.collectives, MAX_CALL_COLLECTIVES, "collectives of a record")
    values = _Values()
    redistribute = _redistribute(message.redistribute) if message.HasField("redistribute") else None
    return CapturedCall(
        kind=CAPTURED_KINDS[message.kind - 1],
        name=name(message.name, "the name of a record", PATH_CHARS),
        arguments=values.read(message.arguments),
        outputs=values.read(message.outputs),
        redistribute=redistribute,
        collectives=tuple(_collective(item) for item in message.collectives),
    )


class _Values:
    """Reads the values of one call, which are limited together."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def read(self, messages: Collection[records_pb2.CapturedValue], nesting: int = 0) -> tuple[CapturedValue, ...]:
        self._left -= len(messages)
        require(self._left >= 0, f"a record has more than {MAX_VALUES} values")
        return tuple(self._value(message, nesting) for message in messages)

    def _value(self, message: records_pb2.CapturedValue, nesting: int) -> CapturedValue:
        keyword = name(message.name, "the name of an argument")
        match message.WhichOneof("value"):
            case "tensor":
                return CapturedValue(keyword, _tensor(message.tensor))
            case "list":
                require(nesting < MAX_NESTING, f"a value holds lists more than {MAX_NESTING} deep")
                return CapturedValue(keyword, self.read(message.list.values, nesting + 1))
            case _:
                text = message.text.replace("\0", "\N{REPLACEMENT CHARACTER}")
                return CapturedValue(keyword, name(text, "an argument", VALUE_CHARS))


def _tensor(message: records_pb2.CapturedTensor) -> CapturedTensor:
    at_most(message.shape, MAX_DIMENSIONS, "dimensions of a tensor")
    at_most(message.mesh, MAX_DIMENSIONS, "dimensions of a mesh")
    require(min(message.shape, default=0) >= -1, "the length of a dimension is less than -1")
    return CapturedTensor(
        type=name(message.type, "the type of a tensor"),
        dtype=name(message.dtype, "an element type"),
        shape=tuple(message.shape),
        placements=name(message.placements, "placements", PATH_CHARS),
        mesh=tuple(message.mesh),
        id=big(message.id, "the number of a tensor"),
    )


def _redistribute(message: records_pb2.CapturedRedistribute) -> CapturedRedistribute:
    return CapturedRedistribute(
        argument=small(message.argument, "an argument") if message.HasField("argument") else None,
        src=name(message.src, "placements", PATH_CHARS),
        dst=name(message.dst, "placements", PATH_CHARS),
        trace=name(message.trace, "the steps of a redistribute", PATH_CHARS),
        implicit=message.implicit,
    )


def _collective(message: records_pb2.CapturedCollective) -> CapturedCollective:
    return CapturedCollective(
        kind=one_of(message.kind, KINDS, "a kind"),
        group=read_group(message.group),
        phase=one_of(message.phase, PHASES, "a phase"),
        module=name(message.module, "the name of a module", PATH_CHARS),
    )


class CaptureLimits:
    """What one rank captured so far: records by step and part, of which the store may know some already."""

    def __init__(self, stored: Mapping[int, Mapping[int, int]]) -> None:
        self._steps = {step: dict(parts) for step, parts in stored.items()}

    def check(self, capture: Capture) -> None:
        """Count one part; a part that came before counts once. Raises MalformedError beyond a limit."""
        if capture.refuses:
            return
        parts = {**self._steps.get(capture.step, {}), capture.part: len(capture.records)}
        records = sum(parts.values())
        require(records <= MAX_RECORDS, f"step {capture.step} has {records} captured records, more than {MAX_RECORDS}")
        known = capture.step in self._steps or len(self._steps) < MAX_CAPTURED_STEPS
        require(known, f"the rank captured {MAX_CAPTURED_STEPS} steps before, as many as are stored")
        self._steps[capture.step] = parts
