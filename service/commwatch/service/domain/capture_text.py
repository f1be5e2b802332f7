"""Records of a capture as text, in the shorthand of torch's DebugMode, and what that leaves out."""

from __future__ import annotations

from collections.abc import Sequence

from commwatch.service.domain.captures import CapturedCall, CapturedRecord, CapturedStep, CapturedTensor, CapturedValue
from commwatch.service.domain.records import Group

INDENT = "  "
REDISTRIBUTE = "redistribute_input"
_HEADERS = {"module": "nn.Mod", "record_function": "record function", "annotation": "annotate"}


def tree_lines(captured: CapturedStep, indices: Sequence[int], *, mesh: bool = False) -> list[str]:
    """One line for each record, two spaces for each level of depth. ``mesh`` adds the mesh of DTensors."""
    rendered = [render_call(call, mesh=mesh) for call in captured.calls]
    return [
        f"{INDENT * captured.records[index].depth}{rendered[captured.records[index].call]}"
        f"{_behind(captured, captured.records[index])}"
        for index in indices
    ]


def render_call(call: CapturedCall, *, mesh: bool = False) -> str:
    """``aten::mm(dt: f32[8, 8]| S(0), t: f32[8, 32])  ->  dt: f32[8, 32]| S(0)``."""
    if call.kind == "redistribute" and call.redistribute is not None:
        text = _redistribute(call, mesh=mesh)
    elif call.kind == "output_placements":
        return f"-> output: {call.name}"
    elif call.kind in _HEADERS:
        return f"[{_HEADERS[call.kind]}] {call.name}"
    elif call.kind == "region":
        return f"[region] {call.name}"
    else:
        arguments = ", ".join(_named(value, mesh=mesh) for value in call.arguments)
        text = f"{'[triton] ' if call.kind == 'triton_kernel' else ''}{call.name}({arguments})"
    return text + _outputs(call.outputs, mesh=mesh)


def group_text(group: Group) -> str:
    """``tp (2 ranks, stride 1)``."""
    stride = f", stride {group.stride}" if group.stride else ""
    return f"{group.name or 'a group without a name'} ({group.size} rank{'' if group.size == 1 else 's'}{stride})"


def _redistribute(call: CapturedCall, *, mesh: bool) -> str:
    found = call.redistribute
    assert found is not None
    placements = f"{found.src} -> {found.dst}"
    if found.argument is not None:
        return f"{REDISTRIBUTE} [implicit] ({found.argument}, {placements})"
    tensor = ", ".join(_named(value, mesh=mesh) for value in call.arguments)
    how = f"trace: {found.trace}" if found.trace else placements
    return f"{REDISTRIBUTE}{'' if found.implicit else ' [explicit] '}({tensor}, {how})"


def _outputs(outputs: Sequence[CapturedValue], *, mesh: bool) -> str:
    if not outputs:
        return ""
    if len(outputs) == 1:
        return f"  ->  {_value(outputs[0], mesh=mesh)}"
    return f"  ->  ({', '.join(_element(value, mesh=mesh) for value in outputs)})"


def _named(value: CapturedValue, *, mesh: bool) -> str:
    return f"{value.name}={_value(value, mesh=mesh)}" if value.name else _value(value, mesh=mesh)


def _value(value: CapturedValue, *, mesh: bool) -> str:
    held = value.value
    if isinstance(held, CapturedTensor):
        return _tensor(held, mesh=mesh)
    if isinstance(held, str):
        return held
    return f"[{', '.join(_element(item, mesh=mesh) for item in held)}]"


def _element(value: CapturedValue, *, mesh: bool) -> str:
    """Of a list: DebugMode prints tensors in lists as Python prints strings."""
    return (
        f"'{_tensor(value.value, mesh=mesh)}'" if isinstance(value.value, CapturedTensor) else _value(value, mesh=mesh)
    )


def _tensor(tensor: CapturedTensor, *, mesh: bool) -> str:
    number = f"${tensor.id}" if tensor.id else ""
    shape = ", ".join("?" if length < 0 else str(length) for length in tensor.shape)
    placements = f"| {tensor.placements}" if tensor.placements else ""
    on = f" on DM({', '.join(map(str, tensor.mesh))})" if mesh and tensor.mesh else ""
    return f"{tensor.type}{number}: {tensor.dtype}[{shape}]{placements}{on}"


def _behind(captured: CapturedStep, record: CapturedRecord) -> str:
    """What stands behind a record: its collectives, the user's line, the hash of its outputs."""
    parts = []
    collectives = captured.calls[record.call].collectives
    for place, item in enumerate(collectives):
        position = "at an unknown position" if record.position is None else f"call {record.position + place}"
        parts.append(f"{item.kind} on {group_text(item.group)}, {item.phase}, {item.module or 'no module'}, {position}")
    if collectives and record.line is not None:
        line = captured.lines[record.line]
        parts.append(f"{line.file}:{line.line} in {line.function}")
    if record.output_hash:
        parts.append(f"hash {record.output_hash}")
    return f"  # {'; '.join(parts)}" if parts else ""
