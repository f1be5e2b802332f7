"""Records to store: small, and different from each other by the arguments."""

from __future__ import annotations

import uuid

from commwatch.service.domain.records import (
    Call,
    CallShapes,
    Cause,
    Commit,
    Facts,
    Goodbye,
    Group,
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
