"""Bodies of content-addressed definitions and statistics, as zstd-compressed JSON arrays.

Arrays without field names: a pattern of ten thousand calls repeats nothing. A body never changes its form: a new form
gets a new leading number, and every number that was ever written stays readable.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any

import zstandard

from commwatch.service.domain.captures import (
    Capture,
    CapturedCall,
    CapturedCollective,
    CapturedRecord,
    CapturedRedistribute,
    CapturedTensor,
    CapturedValue,
)
from commwatch.service.domain.records import (
    BytesStatistics,
    Call,
    CallShapes,
    Cause,
    Definition,
    Group,
    Line,
    Lines,
    MeshDimension,
    Modules,
    Pattern,
    Shapes,
)

_FORM = 1
_LEVEL = 3


def _pack(value: object) -> bytes:
    content = json.dumps([_FORM, value], separators=(",", ":"), ensure_ascii=False).encode()
    return zstandard.ZstdCompressor(level=_LEVEL).compress(content)


def _unpack(blob: bytes) -> Any:
    form, value = json.loads(zstandard.ZstdDecompressor().decompress(blob))
    if form != _FORM:
        raise ValueError(f"A stored body has form {form}, this release reads {_FORM}: upgrade commwatch.")
    return value


def encode(definition: Definition) -> bytes:
    """The stored body of a definition; its hash and its pattern's hash stand in columns."""
    if isinstance(definition, Pattern):
        return _pack([[_call_to_json(call) for call in definition.calls], definition.order, definition.unordered])
    if isinstance(definition, Shapes):
        shapes = [[shape.inputs, shape.outputs, shape.bytes_in, shape.bytes_out] for shape in definition.shapes]
        return _pack([shapes, definition.order])
    if isinstance(definition, Lines):
        return _pack([[[line.file, line.line, line.function] for line in call] for call in definition.calls])
    return _pack(definition.counts)


def decode_pattern(hash_: str, body: bytes) -> Pattern:
    """A pattern from its body."""
    calls, order, unordered = _unpack(body)
    return Pattern(hash_, tuple(_call_from_json(call) for call in calls), tuple(order), unordered)


def decode_shapes(hash_: str, pattern_hash: str, body: bytes) -> Shapes:
    """Shapes from their body."""
    shapes, order = _unpack(body)
    return Shapes(
        hash_,
        pattern_hash,
        tuple(
            CallShapes(tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), bytes_in, bytes_out)
            for inputs, outputs, bytes_in, bytes_out in shapes
        ),
        tuple(order),
    )


def decode_lines(hash_: str, pattern_hash: str, body: bytes) -> Lines:
    """Lines from their body."""
    return Lines(hash_, pattern_hash, tuple(tuple(Line(*line) for line in call) for call in _unpack(body)))


def decode_modules(hash_: str, body: bytes) -> Modules:
    """Modules from their body."""
    return Modules(hash_, tuple((module, count) for module, count in _unpack(body)))


def encode_statistics(statistics: tuple[BytesStatistics, ...]) -> bytes | None:
    """The stored body of a range's statistics; None when there are none."""
    if not statistics:
        return None
    return _pack([[item.call, item.count, item.sum, item.min, item.max] for item in statistics])


def decode_statistics(body: bytes | None) -> tuple[BytesStatistics, ...]:
    """Statistics from their body."""
    return () if body is None else tuple(BytesStatistics(*item) for item in _unpack(body))


def encode_capture(capture: Capture) -> bytes:
    """The stored body of a part of a capture; its step, part, request and summary stand in columns."""
    calls = [
        [
            call.kind,
            call.name,
            [_value_to_json(value) for value in call.arguments],
            [_value_to_json(value) for value in call.outputs],
            call.redistribute and astuple(call.redistribute),
            [[item.kind, _group_to_json(item.group), item.phase, item.module] for item in call.collectives],
        ]
        for call in capture.calls
    ]
    lines = [[line.file, line.line, line.function] for line in capture.lines]
    records = [[item.depth, item.call, item.line, item.position, item.output_hash] for item in capture.records]
    return _pack([calls, lines, records])


def decode_capture(
    body: bytes, *, step: int, part: int, last_part: bool, request: int, dropped_records: int, reason: str
) -> Capture:
    """A part of a capture from its body and columns."""
    calls, lines, records = _unpack(body)
    return Capture(
        step=step,
        part=part,
        last_part=last_part,
        request=request,
        calls=tuple(_captured_call_from_json(call) for call in calls),
        lines=tuple(Line(*line) for line in lines),
        records=tuple(CapturedRecord(*record) for record in records),
        dropped_records=dropped_records,
        reason=reason,
    )


def _value_to_json(value: CapturedValue) -> list[object]:
    held = value.value
    if isinstance(held, CapturedTensor):
        return [value.name, [held.type, held.dtype, held.shape, held.placements, held.mesh, held.id]]
    if isinstance(held, str):
        return [value.name, held]
    # In a list of its own, so that it is not taken for a tensor.
    return [value.name, [[_value_to_json(item) for item in held]]]


def _value_from_json(value: list[Any]) -> CapturedValue:
    name, held = value
    if isinstance(held, str):
        return CapturedValue(name, held)
    if len(held) == 1:
        return CapturedValue(name, tuple(_value_from_json(item) for item in held[0]))
    type_, dtype, shape, placements, mesh, id_ = held
    return CapturedValue(name, CapturedTensor(type_, dtype, tuple(shape), placements, tuple(mesh), id_))


def _captured_call_from_json(value: list[Any]) -> CapturedCall:
    kind, name, arguments, outputs, redistribute, collectives = value
    return CapturedCall(
        kind=kind,
        name=name,
        arguments=tuple(_value_from_json(item) for item in arguments),
        outputs=tuple(_value_from_json(item) for item in outputs),
        redistribute=None if redistribute is None else CapturedRedistribute(*redistribute),
        collectives=tuple(
            CapturedCollective(kind, Group(*group), phase, module) for kind, group, phase, module in collectives
        ),
    )


def encode_mesh(mesh: tuple[MeshDimension, ...]) -> str:
    """A mesh as JSON, readable in SQL."""
    return json.dumps([[dimension.name, dimension.size] for dimension in mesh], separators=(",", ":"))


def decode_mesh(text: str) -> tuple[MeshDimension, ...]:
    """A mesh from its JSON."""
    return tuple(MeshDimension(name, size) for name, size in json.loads(text))


def _call_to_json(call: Call) -> list[object]:
    cause = call.cause and [call.cause.src, call.cause.dst, call.cause.implicit, call.cause.op]
    return [call.phase, call.kind, call.raw_op, _group_to_json(call.group), call.module, cause, call.dtype]


def _group_to_json(group: Group) -> list[object]:
    return [group.name, group.size, group.stride]


def _call_from_json(value: list[Any]) -> Call:
    phase, kind, raw_op, group, module, cause, dtype = value
    return Call(phase, kind, raw_op, Group(*group), module, None if cause is None else Cause(*cause), dtype)
