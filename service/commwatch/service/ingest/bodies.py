"""Reads content-addressed bodies: Pattern, Shapes, Lines and Modules."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from commwatch.service.domain.records import (
    KINDS,
    PHASES,
    Call,
    CallShapes,
    Cause,
    Definition,
    Group,
    Line,
    Lines,
    Modules,
    Pattern,
    Shapes,
)
from commwatch.service.ingest.checks import (
    BIGINT_MAX,
    MAX_CALLS,
    MAX_DIMENSIONS,
    MAX_LINES,
    MAX_MODULES,
    MAX_POSITIONS,
    MAX_SIZES,
    MAX_TENSORS,
    PATH_CHARS,
    MalformedError,
    at_most,
    big,
    digest,
    indices,
    name,
    one_of,
    require,
    small,
)
from commwatch.v1 import ingest_pb2, records_pb2

_M = TypeVar("_M", bound=Message)


def read_definition(message: ingest_pb2.Definition) -> Definition:
    """A definition whose hash is that of its content. Raises MalformedError.

    Shapes and Lines are checked against their pattern by ``known``.
    """
    hash_ = digest(message.hash, "the hash of a definition")
    read = _READERS.get(message.kind)
    if read is None:
        raise MalformedError(f"definition {hash_} has the unknown kind {message.kind}")
    actual = hashlib.blake2b(bytes([message.kind]) + message.content, digest_size=16).hexdigest()
    require(actual == hash_, f"definition {hash_} has content whose hash is {actual}")
    try:
        return read(hash_, message.content)
    except DecodeError:
        raise MalformedError(f"definition {hash_} cannot be decoded") from None


def _parse(into: _M, content: bytes) -> _M:
    into.ParseFromString(content)
    return into


def _pattern(hash_: str, content: bytes) -> Pattern:
    message = _parse(records_pb2.Pattern(), content)
    at_most(message.calls, MAX_CALLS, "calls in a pattern")
    at_most(message.order, MAX_POSITIONS, "positions in a pattern")
    require(not (message.unordered and message.order), "an unordered pattern has an order")
    order = indices(message.order, len(message.calls), "the order of a pattern")
    require(
        message.unordered or len(set(order)) == len(message.calls), "a call of a pattern does not occur in its order"
    )
    return Pattern(hash_, tuple(_call(call) for call in message.calls), order, message.unordered)


def _call(message: records_pb2.Call) -> Call:
    return Call(
        phase=one_of(message.phase, PHASES, "a phase"),
        kind=one_of(message.kind, KINDS, "a kind"),
        raw_op=name(message.raw_op, "the name of an op"),
        group=read_group(message.group),
        module=name(message.module, "the name of a module", PATH_CHARS),
        cause=_cause(message.cause) if message.HasField("cause") else None,
        dtype=name(message.dtype, "an element type"),
    )


def read_group(message: records_pb2.Group) -> Group:
    """A process group."""
    size, stride = small(message.size, "the size of a group"), small(message.stride, "the stride of a group")
    return Group(name(message.name, "the name of a group"), size, stride)


def _cause(message: records_pb2.Cause) -> Cause:
    src, dst = name(message.src, "placements", PATH_CHARS), name(message.dst, "placements", PATH_CHARS)
    return Cause(src, dst, message.implicit, name(message.op, "the name of an op"))


def _shapes(hash_: str, content: bytes) -> Shapes:
    message = _parse(records_pb2.Shapes(), content)
    at_most(message.shapes, MAX_SIZES, "sizes")
    at_most(message.order, MAX_POSITIONS, "positions in shapes")
    order = indices(message.order, len(message.shapes), "the order of shapes")
    sizes = tuple(_call_shapes(shape) for shape in message.shapes)
    total = sum(times * sizes[index].payload_bytes for index, times in Counter(order).items())
    require(total <= BIGINT_MAX, "the bytes of a step exceed a 64-bit number")
    return Shapes(hash_, digest(message.pattern_hash, "the pattern of shapes"), sizes, order)


def _call_shapes(message: records_pb2.CallShapes) -> CallShapes:
    at_most(message.inputs, MAX_TENSORS, "input tensors of a call")
    at_most(message.outputs, MAX_TENSORS, "output tensors of a call")
    return CallShapes(
        inputs=tuple(_dims(shape) for shape in message.inputs),
        outputs=tuple(_dims(shape) for shape in message.outputs),
        bytes_in=big(message.bytes_in, "the bytes of a call"),
        bytes_out=big(message.bytes_out, "the bytes of a call"),
    )


def _dims(message: records_pb2.TensorShape) -> tuple[int, ...]:
    at_most(message.dims, MAX_DIMENSIONS, "dimensions of a tensor")
    return tuple(big(length, "the length of a dimension") for length in message.dims)


def _lines(hash_: str, content: bytes) -> Lines:
    message = _parse(records_pb2.Lines(), content)
    at_most(message.calls, MAX_CALLS, "calls in lines")
    for call in message.calls:
        at_most(call.lines, MAX_LINES, "lines of a call")
    calls = tuple(tuple(read_line(line) for line in call.lines) for call in message.calls)
    return Lines(hash_, digest(message.pattern_hash, "the pattern of lines"), calls)


def read_line(message: records_pb2.Line) -> Line:
    """One line of the user's program."""
    file, function = name(message.file, "a file", PATH_CHARS), name(message.function, "the name of a function")
    return Line(file, small(message.line, "a line number"), function)


def _modules(hash_: str, content: bytes) -> Modules:
    message = _parse(records_pb2.Modules(), content)
    at_most(message.modules, MAX_MODULES, "modules")
    counts = tuple(
        (name(item.module, "the name of a module", PATH_CHARS), small(item.count, "a number of modules"))
        for item in message.modules
    )
    return Modules(hash_, counts)


_READERS: dict[int, Callable[[str, bytes], Definition]] = {
    ingest_pb2.DEFINITION_KIND_PATTERN: _pattern,
    ingest_pb2.DEFINITION_KIND_SHAPES: _shapes,
    ingest_pb2.DEFINITION_KIND_LINES: _lines,
    ingest_pb2.DEFINITION_KIND_MODULES: _modules,
}
