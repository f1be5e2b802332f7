"""A captured step as messages of the wire, in parts that fit a frame."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from commwatch.agent.debug import torch_private as private
from commwatch.agent.debug.calls import AnnotateCall, KernelCall, OpCall, OutputPlacementCall, RedistributeCall
from commwatch.agent.debug.snapshot import GroupText, TensorFacts, Text, complete
from commwatch.agent.recorder.observer import Identity, Line
from commwatch.v1 import records_pb2

PART_RECORDS = 5_000
"""Records of one part: some hundred kilobytes."""

TEXT_CHARS = 200
MAX_VALUES = 1_000
"""Elements kept of one list; a text says how many more there were."""

_MAX_NESTING = 8
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Differs from run to run and from rank to rank."""


class Encoder:
    """Builds parts. ``identities`` and ``lines`` are what the records' collectives and places count in."""

    def __init__(
        self,
        operators: Sequence[Any],
        collectives: dict[int, list[tuple[int, int]]],
        identities: Sequence[Identity],
        lines: Sequence[Line],
    ) -> None:
        self._operators = operators
        self._collectives = collectives
        self._identities = identities
        self._lines = lines

    def parts(self) -> Iterator[records_pb2.Capture]:
        """Parts without step, number and end. At least one."""
        for start in range(0, max(len(self._operators), 1), PART_RECORDS):
            yield self._part(start, self._operators[start : start + PART_RECORDS])

    def _part(self, start: int, operators: Sequence[Any]) -> records_pb2.Capture:
        message = records_pb2.Capture()
        calls: dict[Any, int] = {}
        lines: dict[int, int] = {}
        for index, call in enumerate(operators, start):
            issued = self._collectives.get(index, [])
            key = (_key(call), tuple(identity for identity, _ in issued))
            number = calls.get(key)
            if number is None:
                number = calls[key] = len(calls)
                message.calls.append(self._call(call, [identity for identity, _ in issued]))
            record = message.records.add(depth=max(0, call.call_depth - 1), call=number)
            place = getattr(call, "place", None)
            if place:
                if place not in lines:
                    lines[place] = len(lines) + 1
                    line = self._lines[place - 1]
                    message.lines.add(file=line.file, line=line.line, function=line.function)
                record.line = lines[place]
            if issued:
                record.position = issued[0][1]
            log = getattr(call, "log", None)
            if log and "hash" in log:
                record.output_hash = _hash_text(log["hash"])
        return message

    def _call(self, call: Any, identities: list[int]) -> records_pb2.CapturedCall:
        message = records_pb2.CapturedCall(kind=_kind(call), name=_name(call)[:TEXT_CHARS])
        if isinstance(call, OpCall):
            message.arguments.extend(_values(call.values))
            message.arguments.extend(_value(value, name) for name, value in (call.keywords or {}).items())
            if call.output_str is not None:
                outputs = call.output if isinstance(call.output, (list, tuple)) else [call.output]
                message.outputs.extend(_values([_without_data(output) for output in outputs]))
        elif isinstance(call, KernelCall):
            message.arguments.extend(_value(value, name) for name, value in call.keywords.items())
        elif isinstance(call, RedistributeCall):
            self._redistribute(message, call)
        for identity in identities:
            message.collectives.append(_collective(self._identities[identity]))
        return message

    @staticmethod
    def _redistribute(message: records_pb2.CapturedCall, call: RedistributeCall) -> None:
        found = message.redistribute
        found.src, found.dst = _placements(call.src), _placements(call.dst)
        found.trace = (call.transform_info_str or "")[: 4 * TEXT_CHARS]
        found.implicit = not call.is_explicit
        if call.is_outer_call:
            found.argument = call.value
        else:
            message.arguments.append(_value(call.value))


def _without_data(output: Any) -> Any:
    """A number that an op returned is a tensor's value, which stays in the job: its type is kept."""
    return type(output).__name__ if isinstance(output, (bool, int, float, complex)) else output


def _placements(value: Any) -> str:
    text = "".join([str(placement) for placement in value]) if isinstance(value, tuple) else str(value)
    return text[: 4 * TEXT_CHARS]


def _collective(identity: Identity) -> records_pb2.CapturedCollective:
    group = identity.group
    return records_pb2.CapturedCollective(
        kind=identity.op.kind,
        group=records_pb2.Group(name=group.name, size=group.size, stride=group.stride),
        phase=identity.phase,
        module=identity.module,
    )


def _kind(call: Any) -> records_pb2.CapturedKind.ValueType:
    kind = getattr(call, "kind", None)
    if kind is None:  # a record that torch itself made
        kind = "op"
        if isinstance(call, private.AnnotateCall):
            kind = "region" if "region" in str(call.header) else "annotation"
    return records_pb2.CapturedKind.Value(f"CAPTURED_KIND_{kind.upper()}")


def _name(call: Any) -> str:
    if isinstance(call, OpCall):
        return call.name
    if isinstance(call, RedistributeCall):
        return "redistribute_input"
    if isinstance(call, OutputPlacementCall):
        return str(call.placements_str)
    if isinstance(call, AnnotateCall):
        return f"{call.tag} (backward)" if call.header.endswith("backward") else str(call.tag)
    return str(getattr(call, "kernel_name", None) or getattr(call, "tag", None) or call)


def _key(call: Any) -> Any:
    """What two records that differ only in their place have in common."""
    if isinstance(call, OpCall):
        keywords = tuple((call.keywords or {}).items())
        output = call.output if call.has_output else None
        return id(call.op), call.kind, _hashable(call.values), _hashable(keywords), _hashable(output)
    return call.render([]), getattr(call, "is_explicit", None)


def _hashable(value: Any) -> Any:
    if isinstance(value, TensorFacts):
        return value  # shared: equal facts are one object
    if isinstance(value, Text):
        return complete(value)
    if isinstance(value, (list, tuple)):
        return tuple([_hashable(item) for item in value])
    if isinstance(value, float):
        return repr(value)
    return (type(value), value) if isinstance(value, (int, str, type(None))) else str(value)


def _hash_text(found: Any) -> str:
    """The hashes as text; a hash of them when there are too many."""
    text = str(found)
    if len(text) <= TEXT_CHARS:
        return text
    return f"blake2b:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _values(values: Sequence[Any], depth: int = 0) -> list[records_pb2.CapturedValue]:
    found = [_value(value, depth=depth) for value in values[:MAX_VALUES]]
    if len(values) > MAX_VALUES:
        found.append(records_pb2.CapturedValue(text=f"... {len(values) - MAX_VALUES} more"))
    return found


def _value(value: Any, name: str = "", depth: int = 0) -> records_pb2.CapturedValue:
    message = records_pb2.CapturedValue(name=name)
    if isinstance(value, TensorFacts):
        message.tensor.CopyFrom(_tensor(value))
    elif isinstance(value, (list, tuple)) and depth < _MAX_NESTING and not isinstance(value, str):
        message.list.values.extend(_values(value, depth + 1))
        message.list.SetInParent()
    else:
        if isinstance(value, (float, complex)):
            value = type(value).__name__  # may be a tensor's value that the program read; lengths and flags are kept
        text = str(value.group) if isinstance(value, GroupText) else _ADDRESS.sub("", str(value))
        message.text = text if len(text) <= TEXT_CHARS else f"{text[: TEXT_CHARS - 3]}..."
    return message


def _tensor(facts: TensorFacts) -> records_pb2.CapturedTensor:
    return records_pb2.CapturedTensor(
        type=facts.type,
        dtype=facts.dtype,
        shape=[length if isinstance(length, int) else -1 for length in facts.shape],
        placements=facts.placements or "",
        mesh=facts.mesh,
        id=0 if facts.number is None else facts.number + 1,
    )
