"""Serializes what the recorder knows into the messages of ``commwatch.v1``.

The bytes of Pattern, Shapes, Lines and Modules are their identity: they hold no map and are written in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commwatch.agent.recorder.attribution import Cause
from commwatch.agent.recorder.groups import Group
from commwatch.agent.recorder.observer import Identity, Line, Sizes
from commwatch.v1 import ingest_pb2, records_pb2

PATTERN = int(ingest_pb2.DEFINITION_KIND_PATTERN)
SHAPES = int(ingest_pb2.DEFINITION_KIND_SHAPES)
LINES = int(ingest_pb2.DEFINITION_KIND_LINES)
MODULES = int(ingest_pb2.DEFINITION_KIND_MODULES)


def _group(group: Group) -> records_pb2.Group:
    return records_pb2.Group(name=group.name, size=group.size, stride=group.stride)


def _cause(cause: Cause | None) -> records_pb2.Cause | None:
    if cause is None:
        return None
    return records_pb2.Cause(src=cause.src, dst=cause.dst, implicit=cause.implicit, op=cause.op)


def _call(identity: Identity) -> records_pb2.Call:
    return records_pb2.Call(
        phase=identity.phase,
        kind=identity.op.kind,
        raw_op=identity.op.name,
        group=_group(identity.group),
        module=identity.module,
        cause=_cause(identity.cause),
        dtype=identity.dtype,
    )


def pattern(calls: Iterable[Identity], order: Sequence[int], *, unordered: bool = False) -> bytes:
    """A Pattern: ``order`` indexes into ``calls``."""
    message = records_pb2.Pattern(calls=[_call(identity) for identity in calls], order=order, unordered=unordered)
    return message.SerializeToString(deterministic=True)


def shapes(pattern_hash: bytes, sizes: Iterable[Sizes], order: Sequence[int]) -> bytes:
    """A Shapes: ``order`` indexes into ``sizes``, one element for each position of the pattern."""
    message = records_pb2.Shapes(
        pattern_hash=pattern_hash,
        shapes=[
            records_pb2.CallShapes(
                inputs=[records_pb2.TensorShape(dims=dims) for dims in size.inputs],
                outputs=[records_pb2.TensorShape(dims=dims) for dims in size.outputs],
                bytes_in=size.bytes_in,
                bytes_out=size.bytes_out,
            )
            for size in sizes
        ],
        order=order,
    )
    return message.SerializeToString(deterministic=True)


def lines(pattern_hash: bytes, calls: Iterable[Sequence[Line]]) -> bytes:
    """A Lines: one element for each call of the pattern."""
    message = records_pb2.Lines(
        pattern_hash=pattern_hash,
        calls=[
            records_pb2.CallLines(
                lines=[records_pb2.Line(file=line.file, line=line.line, function=line.function) for line in found]
            )
            for found in calls
        ],
    )
    return message.SerializeToString(deterministic=True)


def modules(inventory: Iterable[tuple[str, int]]) -> bytes:
    """A Modules from (folded name, count) pairs that are sorted by name."""
    message = records_pb2.Modules(
        modules=[records_pb2.ModuleCount(module=name, count=count) for name, count in inventory]
    )
    return message.SerializeToString(deterministic=True)
