"""Records to store: small, and different from each other by the arguments."""

from __future__ import annotations

import uuid

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
    Call,
    CallShapes,
    Cause,
    Commit,
    Completeness,
    Facts,
    Goodbye,
    Group,
    GroupCompleteness,
    Hello,
    Line,
    Lines,
    MeshDimension,
    Modules,
    Pattern,
    Progress,
    RankKey,
    Shapes,
    StepRange,
)

NOW = 1_800_000_000_000_000_000
SECOND = 1_000_000_000


def run_id(number: int) -> str:
    return str(uuid.UUID(int=number))


def hash_of(number: int) -> str:
    return f"{number:032x}"


def sha(number: int) -> str:
    return f"{number:040x}"


def key(run: int = 1, attempt: int = 0, rank: int = 0) -> RankKey:
    return RankKey(run_id(run), attempt, rank)


def hello(
    run: int = 1,
    attempt: int = 0,
    rank: int = 0,
    *,
    world_size: int = 1,
    project: str = "default",
    workload: str = "train",
    commit: Commit | None = None,
    started_unix_ns: int = NOW,
) -> Hello:
    return Hello(
        key=key(run, attempt, rank),
        project=project,
        workload=workload,
        world_size=world_size,
        commit=commit or Commit(sha(7), "main", False, (sha(6), sha(5)), "Seven"),
        hostname=f"host{rank}",
        pid=1000 + rank,
        torch_version="2.13.0+cpu",
        agent_version="0.1.0",
        started_unix_ns=started_unix_ns,
        script="train.py",
    )


def call(layer: int = 0, kind: str = "all_gather", cause: Cause | None = None) -> Call:
    module = f"layers.{layer}.wo"
    return Call("forward", kind, "c10d::_allgather_base_", Group("tp", 2, 1), module, cause, "float32")


def pattern(number: int = 1) -> Pattern:
    cause = Cause("S(0)", "R", True, "aten.mm.default")
    calls = (call(0), call(1), call(0, "reduce_scatter", cause))
    return Pattern(hash_of(number), calls, (0, 1, 2, 0))


def shapes(number: int = 11, pattern_number: int = 1) -> Shapes:
    sizes = (CallShapes(((2, 4),), ((4, 4),), 32, 64), CallShapes(((8,),), ((4,),), 32, 16))
    return Shapes(hash_of(number), hash_of(pattern_number), sizes, (0, 0, 1, 0))


def lines(number: int = 21, pattern_number: int = 1) -> Lines:
    wo = (Line("model.py", 12, "forward"),)
    return Lines(hash_of(number), hash_of(pattern_number), (wo, wo, (*wo, Line("train.py", 3, "step"))))


def modules(number: int = 31) -> Modules:
    return Modules(hash_of(number), (("layers.*", 2), ("layers.*.wo", 2)))


def step_range(number: int = 1, first: int = 1, last: int = 1, *, pattern_number: int = 1) -> StepRange:
    return StepRange(
        number, first, last, last - first + 1, hash_of(pattern_number), hash_of(11), hash_of(21), (), 0, False
    )


def facts(backend: str = "gloo", compile_mode: str = "eager") -> Facts:
    return Facts((MeshDimension("dp", 2), MeshDimension("tp", 2)), "cpu", backend, compile_mode, hash_of(31))


def progress(
    range_: int = 1, last_step: int = 1, range_steps: int = 1, steps: int = 1, calls: int = 4, reason: str = ""
) -> Progress:
    return Progress(range_, last_step, range_steps, steps, calls, 0, 0, reason)


def goodbye(ending: str = "clean", detail: str = "", last: Progress | None = None) -> Goodbye:
    return Goodbye(ending, detail, last or progress())


TP, SOLO = Group("tp", 2, 1), Group("solo", 1, 0)
FORWARD = Line("model.py", 12, "forward")


def completeness(
    recorded: int = 3, expected: int = 3, step: int = 1, unattributed: int = 0, graph_calls: int = 0
) -> Completeness:
    """One group with a second source, and one without."""
    groups = (GroupCompleteness(TP, recorded, expected, "sequence"), GroupCompleteness(SOLO, 1, None, ""))
    unequal = recorded != expected
    return Completeness(step, groups, unattributed, int(unequal), step if unequal else 0, graph_calls)


def tensor(type_: str = "t", *shape: int, placements: str = "", mesh: tuple[int, ...] = ()) -> CapturedValue:
    return CapturedValue("", CapturedTensor(type_, "f32", shape, placements, mesh, 0))


def captured_calls() -> tuple[CapturedCall, ...]:
    """What ``wire_samples.captured_calls`` says."""
    gather = CapturedCollective("all_gather", TP, "forward", "layers.0.wo")
    sharded = tensor("dt", 8, 32, placements="S(0)", mesh=(2,))
    left = tensor("dt", 8, 8, placements="S(0)", mesh=(2,))
    local, whole = tensor("t", 4, 32), tensor("t", 8, 32)
    numbers = (CapturedValue("", "2"), CapturedValue("", "0"))
    return (
        CapturedCall("module", "layers.0.wo"),
        CapturedCall("dtensor_op", "aten::mm", (left, sharded), (sharded,)),
        CapturedCall("redistribute", "", redistribute=CapturedRedistribute(1, "S(0)", "R", "", True)),
        CapturedCall(
            "redistribute", "", (local,), redistribute=CapturedRedistribute(None, "S(0)", "R", "S(0)->R", True)
        ),
        CapturedCall(
            "op", "_c10d_functional::all_gather_into_tensor", (local, *numbers), (whole,), collectives=(gather,)
        ),
        CapturedCall("op", "aten::t", (whole,), (tensor("t", 32, 8),)),
    )


def captured_records() -> tuple[CapturedRecord, ...]:
    """Module, op, decision, redistribute, collective; then a trivial op in the op."""
    above = tuple(CapturedRecord(depth, depth, 0) for depth in range(4))
    return (*above, CapturedRecord(4, 4, 0, 1), CapturedRecord(2, 5))


def capture(
    step: int = 3, part: int = 1, last_part: bool = True, request: int = 0, dropped: int = 0, reason: str = ""
) -> Capture:
    return Capture(step, part, last_part, request, captured_calls(), (FORWARD,), captured_records(), dropped, reason)


def refusal(request: int, reason: str) -> Capture:
    return Capture(0, 1, True, request, (), (), (), 0, reason)
