"""The records of ``samples`` as agents send them, with true hashes."""

from __future__ import annotations

import hashlib
from typing import Any

from google.protobuf.message import Message

from commwatch.v1 import ingest_pb2, records_pb2
from tests.contract.samples import NOW, run_id, sha

PATTERN, SHAPES, LINES, MODULES = (
    ingest_pb2.DEFINITION_KIND_PATTERN,
    ingest_pb2.DEFINITION_KIND_SHAPES,
    ingest_pb2.DEFINITION_KIND_LINES,
    ingest_pb2.DEFINITION_KIND_MODULES,
)


def definition(kind: ingest_pb2.DefinitionKind.ValueType, message: Message) -> ingest_pb2.Definition:
    content = message.SerializeToString(deterministic=True)
    digest = hashlib.blake2b(bytes([kind]) + content, digest_size=16).digest()
    return ingest_pb2.Definition(kind=kind, hash=digest, content=content)


def call(module: str = "layers.0.wo", kind: str = "all_gather") -> records_pb2.Call:
    group = records_pb2.Group(name="tp", size=2, stride=1)
    return records_pb2.Call(
        phase="forward",
        kind=kind,
        raw_op="c10d::_allgather_base_",
        group=group,
        module=module,
        cause=records_pb2.Cause(src="S(0)", dst="R", implicit=True, op="aten.mm.default"),
        dtype="float32",
    )


def pattern(module: str = "layers.0.wo") -> ingest_pb2.Definition:
    return definition(PATTERN, records_pb2.Pattern(calls=[call(module), call(module, "all_reduce")], order=[0, 1, 0]))


def shapes(of: ingest_pb2.Definition, order: tuple[int, ...] = (0, 0, 0)) -> ingest_pb2.Definition:
    size = records_pb2.CallShapes(
        inputs=[records_pb2.TensorShape(dims=[2, 4])],
        outputs=[records_pb2.TensorShape(dims=[4, 4])],
        bytes_in=32,
        bytes_out=64,
    )
    return definition(SHAPES, records_pb2.Shapes(pattern_hash=of.hash, shapes=[size], order=order))


def lines(of: ingest_pb2.Definition, calls: int = 2) -> ingest_pb2.Definition:
    one = records_pb2.CallLines(lines=[records_pb2.Line(file="model.py", line=12, function="forward")])
    return definition(LINES, records_pb2.Lines(pattern_hash=of.hash, calls=[one] * calls))


def modules() -> ingest_pb2.Definition:
    return definition(MODULES, records_pb2.Modules(modules=[records_pb2.ModuleCount(module="layers.*.wo", count=2)]))


P = pattern()
S = shapes(P)
L = lines(P)
M = modules()


def step_range(number: int = 1, first: int = 1, last: int = 1, **fields: object) -> records_pb2.StepRange:
    values: dict[str, object] = {"pattern_hash": P.hash, "shapes_hash": S.hash, "lines_hash": L.hash, **fields}
    message = records_pb2.StepRange(number=number, first_step=first, last_step=last, steps=max(last - first + 1, 0))
    for name, value in values.items():
        setattr(message, name, value)
    return message


def facts(**fields: object) -> records_pb2.Facts:
    message = records_pb2.Facts(
        mesh=[records_pb2.MeshDimension(name="tp", size=2)],
        device_type="cpu",
        backend="gloo",
        compile_mode="eager",
        modules_hash=M.hash,
    )
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def completeness(
    recorded: int = 3, expected: int = 3, step: int = 1, unattributed: int = 0, **fields: object
) -> records_pb2.Completeness:
    """One group with a second source, and one without."""
    tp, solo = records_pb2.Group(name="tp", size=2, stride=1), records_pb2.Group(name="solo", size=1)
    message = records_pb2.Completeness(
        step=step,
        groups=[
            records_pb2.GroupCompleteness(group=tp, recorded=recorded, expected=expected, source="sequence"),
            records_pb2.GroupCompleteness(group=solo, recorded=1),
        ],
        unattributed=unattributed,
    )
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def tensor(
    type_: str = "t", *shape: int, placements: str = "", mesh: tuple[int, ...] = ()
) -> records_pb2.CapturedValue:
    found = records_pb2.CapturedTensor(type=type_, dtype="f32", shape=shape, placements=placements, mesh=mesh)
    return records_pb2.CapturedValue(tensor=found)


def captured_calls() -> list[records_pb2.CapturedCall]:
    """A matmul of two sharded DTensors in a module: see ``captured_records``."""
    group = records_pb2.Group(name="tp", size=2, stride=1)
    gather = records_pb2.CapturedCollective(kind="all_gather", group=group, phase="forward", module="layers.0.wo")
    dt = [tensor("dt", 8, 8, placements="S(0)", mesh=(2,)), tensor("dt", 8, 32, placements="S(0)", mesh=(2,))]
    ends: dict[str, Any] = {"src": "S(0)", "dst": "R", "implicit": True}
    return [
        records_pb2.CapturedCall(kind=records_pb2.CAPTURED_KIND_MODULE, name="layers.0.wo"),
        records_pb2.CapturedCall(
            kind=records_pb2.CAPTURED_KIND_DTENSOR_OP,
            name="aten::mm",
            arguments=dt,
            outputs=[tensor("dt", 8, 32, placements="S(0)", mesh=(2,))],
        ),
        records_pb2.CapturedCall(
            kind=records_pb2.CAPTURED_KIND_REDISTRIBUTE,
            redistribute=records_pb2.CapturedRedistribute(argument=1, **ends),
        ),
        records_pb2.CapturedCall(
            kind=records_pb2.CAPTURED_KIND_REDISTRIBUTE,
            arguments=[tensor("t", 4, 32)],
            redistribute=records_pb2.CapturedRedistribute(trace="S(0)->R", **ends),
        ),
        records_pb2.CapturedCall(
            kind=records_pb2.CAPTURED_KIND_OP,
            name="_c10d_functional::all_gather_into_tensor",
            arguments=[tensor("t", 4, 32), records_pb2.CapturedValue(text="2"), records_pb2.CapturedValue(text="0")],
            outputs=[tensor("t", 8, 32)],
            collectives=[gather],
        ),
        records_pb2.CapturedCall(
            kind=records_pb2.CAPTURED_KIND_OP,
            name="aten::t",
            arguments=[tensor("t", 8, 32)],
            outputs=[tensor("t", 32, 8)],
        ),
    ]


def captured_records() -> list[records_pb2.CapturedRecord]:
    """``captured_calls`` as a tree: module, op, decision, redistribute, collective; then a trivial op."""
    depths = [(0, 0), (1, 1), (2, 2), (3, 3)]
    records = [records_pb2.CapturedRecord(depth=depth, call=call, line=1) for depth, call in depths]
    records.append(records_pb2.CapturedRecord(depth=4, call=4, line=1, position=1))
    records.append(records_pb2.CapturedRecord(depth=2, call=5))
    return records


def capture(
    step: int = 3, part: int = 1, last_part: bool = True, request: int = 0, **fields: Any
) -> records_pb2.Capture:
    return records_pb2.Capture(
        **{
            "step": step,
            "part": part,
            "last_part": last_part,
            "request": request,
            "calls": captured_calls(),
            "lines": [records_pb2.Line(file="model.py", line=12, function="forward")],
            "records": captured_records(),
            **fields,
        }
    )


def refusal(request: int, reason: str) -> records_pb2.Capture:
    return records_pb2.Capture(part=1, last_part=True, request=request, reason=reason)


Content = records_pb2.StepRange | records_pb2.Facts | records_pb2.Completeness | records_pb2.Capture


def _frame(number: int, content: Content) -> ingest_pb2.Frame:
    if isinstance(content, records_pb2.Facts):
        return ingest_pb2.Frame(number=number, facts=content)
    if isinstance(content, records_pb2.Completeness):
        return ingest_pb2.Frame(number=number, completeness=content)
    if isinstance(content, records_pb2.Capture):
        return ingest_pb2.Frame(number=number, capture=content)
    return ingest_pb2.Frame(number=number, range=content)


def frames(*contents: Content, first: int = 1) -> ingest_pb2.FrameBatch:
    made = [_frame(number, content) for number, content in enumerate(contents, first)]
    return ingest_pb2.FrameBatch(frames=made)


def hello(run: int = 1, attempt: int = 0, rank: int = 0, world_size: int = 1, **fields: object) -> ingest_pb2.Hello:
    message = ingest_pb2.Hello(
        agent_version="0.1.0",
        project="default",
        workload="train",
        run_id=run_id(run),
        attempt=attempt,
        rank=rank,
        world_size=world_size,
        commit=ingest_pb2.Commit(sha=sha(7), branch="main", ancestors=[sha(6), sha(5)], subject="Seven"),
        hostname="host",
        pid=1000,
        torch_version="2.13.0+cpu",
        started_unix_ns=NOW,
        script="train.py",
    )
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def progress(range_: int = 1, last_step: int = 1, range_steps: int = 1, steps: int = 1) -> ingest_pb2.Progress:
    return ingest_pb2.Progress(range=range_, last_step=last_step, range_steps=range_steps, steps=steps, calls=3 * steps)


def goodbye(
    ending: ingest_pb2.Ending.ValueType = ingest_pb2.ENDING_CLEAN, last: ingest_pb2.Progress | None = None
) -> ingest_pb2.Goodbye:
    return ingest_pb2.Goodbye(ending=ending, progress=last or progress())
