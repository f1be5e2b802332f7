"""Jobs for tests: a few words describe what each rank ran; the same job is built in memory or fed to a store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from commwatch.service.domain.records import (
    Call,
    CallShapes,
    Cause,
    Commit,
    Definition,
    Facts,
    Frame,
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
from commwatch.service.domain.runs import Environment, Rank, RankRanges, Run
from commwatch.service.domain.steady import NotSteady, choose
from commwatch.service.domain.steady_run import SteadyRun, build
from commwatch.service.store.contract import Store, StreamWrite

NOW = 1_800_000_000_000_000_000
SECOND = 1_000_000_000
TP = Group("tp", 2, 1)
MESH = (MeshDimension("dp", 2), MeshDimension("tp", 2))
IMPLICIT = Cause("S(0)", "R", True, "aten.mm.default")


def sha(number: int) -> str:
    """Commit ``number`` of a straight history; its parent is ``number - 1``."""
    return hashlib.sha1(f"commit {number}".encode()).hexdigest()


def ancestors(number: int) -> tuple[str, ...]:
    return tuple(sha(n) for n in range(number - 1, 0, -1))


def run_id(number: int) -> str:
    return f"{number:08x}-0000-7000-8000-{number:012x}"


def digest(*content: object) -> str:
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Calls:
    """``times`` equal collectives in a row, of ``payload`` bytes each."""

    kind: str
    module: str = ""
    times: int = 1
    payload: int = 64
    phase: str = "forward"
    cause: Cause | None = None
    group: Group = TP
    line: Line | None = None
    dtype: str = "float32"

    @property
    def call(self) -> Call:
        raw = f"c10d::{self.kind}_"
        return Call(self.phase, self.kind, raw, self.group, self.module, self.cause, self.dtype)


Step = tuple[Calls, ...]


def layers(count: int, *calls: Calls) -> Step:
    """The calls once in each layer: ``*`` in a module becomes its number."""
    return tuple(replace(call, module=call.module.replace("*", str(n))) for n in range(count) for call in calls)


@dataclass(frozen=True)
class Definitions:
    """What a step of some calls is made of."""

    pattern: Pattern
    shapes: Shapes
    lines: Lines


def define(step: Step, *, unordered: bool = False) -> Definitions:
    calls = tuple(dict.fromkeys(part.call for part in step))
    order = tuple(calls.index(part.call) for part in step for _ in range(part.times))
    pattern_hash = digest("pattern", calls, order, unordered)
    sizes = tuple(dict.fromkeys(part.payload for part in step))
    shapes = tuple(CallShapes(((size,),), ((size // 2,),), size, size // 2) for size in sizes)
    shape_order = tuple(sizes.index(part.payload) for part in step for _ in range(part.times))
    by_call = tuple(
        tuple(dict.fromkeys(part.line for part in step if part.call == call and part.line is not None))
        for call in calls
    )
    return Definitions(
        Pattern(pattern_hash, calls, () if unordered else order, unordered),
        Shapes(digest("shapes", pattern_hash, sizes, shape_order), pattern_hash, shapes, shape_order),
        Lines(digest("lines", pattern_hash, by_call), pattern_hash, by_call),
    )


def modules(counts: Mapping[str, int]) -> Modules:
    pairs = tuple(sorted(counts.items()))
    return Modules(digest("modules", pairs), pairs)


@dataclass(frozen=True)
class Job:
    """A run. ``steps`` are those of every rank; ``of_rank`` overrides the step of single ranks.

    ``commit`` is a number of the straight history, unless ``sha`` and ``parents`` name a real one.
    """

    number: int = 1
    step: Step = ()
    steps: int = 10
    of_rank: Mapping[int, Step] = field(default_factory=dict)
    warm_up: Step | None = None
    modules: Mapping[str, int] | None = None
    world_size: int = 4
    commit: int = 7
    has_commit: bool = True
    branch: str = "main"
    dirty: bool = False
    project: str = "default"
    workload: str = "train"
    backend: str = "gloo"
    state: str = "complete"
    accepted: str | None = None
    sha: str = ""
    parents: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return run_id(self.number)

    @property
    def started(self) -> int:
        return NOW + self.number * SECOND

    @property
    def environment(self) -> Environment:
        return Environment("2.13.0+cpu", self.backend, "cpu", self.world_size, MESH, "eager")

    @property
    def facts(self) -> Facts:
        inventory = None if self.modules is None else modules(self.modules).hash
        return Facts(MESH, "cpu", self.backend, "eager", inventory)

    def run(self) -> Run:
        """As a store would return it."""
        return Run(
            id=self.id,
            project=self.project,
            workload=self.workload,
            commit_sha=sha(self.commit) if self.has_commit else "",
            commit_subject=f"Commit {self.commit}",
            branch=self.branch,
            dirty=self.dirty,
            script="train.py",
            state=self.state,
            attempt=0,
            world_size=self.world_size,
            environment=self.environment,
            started_unix_ns=self.started,
            last_seen_unix_ns=self.started,
            ended_unix_ns=None if self.state == "running" else self.started,
            steps=self.steps,
            calls=0,
            open_alerts=0,
            accepted_reason=self.accepted,
            accepted_by=None if self.accepted is None else "Ada",
            accepted_unix_ns=None if self.accepted is None else self.started,
        )

    def ranges_of(self, rank: int) -> tuple[StepRange, ...]:
        found = []
        first = 1
        if self.warm_up is not None:
            found.append(_range(1, 1, 1, define(self.warm_up)))
            first = 2
        if self.steps:
            step = define(self.of_rank.get(rank, self.step))
            found.append(_range(len(found) + 1, first, first + self.steps - 1, step))
        return tuple(found)

    def definitions_of(self, rank: int) -> list[Definition]:
        steps = [self.of_rank.get(rank, self.step), *([self.warm_up] if self.warm_up is not None else [])]
        found: list[Definition] = []
        for step in steps:
            parts = define(step)
            found += [parts.pattern, parts.shapes, parts.lines]
        if self.modules is not None:
            found.append(modules(self.modules))
        return found

    def inputs(self) -> tuple[Run, list[Rank], list[RankRanges], dict[str, Definition]]:
        """What ``choose`` and ``build`` take."""
        numbers = range(self.world_size)
        ranks = [_rank(self, number) for number in numbers]
        ranges = [RankRanges(number, self.ranges_of(number)) for number in numbers]
        definitions = {found.hash: found for number in numbers for found in self.definitions_of(number)}
        return self.run(), ranks, ranges, definitions

    def steady(self) -> SteadyRun:
        run, ranks, ranges, definitions = self.inputs()
        choice = choose(run, ranks, ranges, definitions)
        assert not isinstance(choice, NotSteady), choice
        built = build(run, ranks, choice, definitions)
        assert isinstance(built, SteadyRun), built
        return built

    def feed(self, store: Store, *, endings: Mapping[int, str] | None = None) -> Run:
        """Report the job to a store; every rank ends with ``clean``, or ``endings`` of its own, "" for none."""
        commit = Commit("", "", False, (), "")
        if self.has_commit:
            parents = ancestors(self.commit)
            commit = Commit(sha(self.commit), self.branch, self.dirty, parents, f"Commit {self.commit}")
            if self.sha:
                commit = replace(commit, sha=self.sha, ancestors=self.parents)
        default = "" if self.state == "running" else "clean"
        for rank in range(self.world_size):
            key = RankKey(self.id, 0, rank)
            hello = Hello(
                key,
                self.project,
                self.workload,
                self.world_size,
                commit,
                f"host{rank}",
                1000 + rank,
                "2.13.0+cpu",
                "0.1.0",
                self.started,
                "train.py",
            )
            store.open_stream(hello, self.started)
        for rank in range(self.world_size):
            contents: list[Facts | StepRange] = [self.facts, *self.ranges_of(rank)]
            frames = [Frame(number, content) for number, content in enumerate(contents, 1)]
            steps = self.steps + (self.warm_up is not None)
            progress = Progress(len(contents) - 1, steps, self.steps, steps, 0, 0, 0, "")
            ending = (endings or {}).get(rank, default)
            write = StreamWrite(RankKey(self.id, 0, rank), self.project, list(frames), self.definitions_of(rank))
            write.progress = progress
            write.goodbye = Goodbye(ending, "", progress) if ending else None
            store.apply([write], self.started)
        if self.accepted is not None:
            store.accept(self.id, self.accepted, "Ada", self.started)
        run = store.run(self.id)
        assert run is not None
        return run


def _range(number: int, first: int, last: int, step: Definitions) -> StepRange:
    return StepRange(number, first, last, last - first + 1, step.pattern.hash, step.shapes.hash, step.lines.hash)


def _rank(job: Job, number: int) -> Rank:
    steps = sum(step_range.steps for step_range in job.ranges_of(number))
    return Rank(
        run_id=job.id,
        attempt=0,
        rank=number,
        hostname=f"host{number}",
        pid=1000 + number,
        state="clean",
        detail="",
        acked_frame=3,
        steps=steps,
        calls=0,
        stored_steps=steps,
        dropped_calls=0,
        dropped_steps=0,
        rejected_frames=0,
        facts=job.facts,
        last_seen_unix_ns=job.started,
    )
