"""Reads the messages of a stream: hello, frames, progress and goodbye. Raises MalformedError."""

from __future__ import annotations

from commwatch.service.domain.records import (
    BytesStatistics,
    Commit,
    Completeness,
    Facts,
    Frame,
    Goodbye,
    GroupCompleteness,
    Hello,
    MeshDimension,
    Progress,
    RankKey,
    StepRange,
)
from commwatch.service.ingest.bodies import read_group
from commwatch.service.ingest.captures import read_capture
from commwatch.service.ingest.checks import (
    MAX_ANCESTORS,
    MAX_CALLS,
    MAX_GROUPS,
    MAX_MESH_DIMENSIONS,
    PATH_CHARS,
    MalformedError,
    at_most,
    big,
    canonical_uuid,
    commit_sha,
    digest,
    name,
    one_of,
    optional_digest,
    require,
    sentence,
    small,
)
from commwatch.v1 import ingest_pb2, records_pb2

_ENDINGS = {
    int(ingest_pb2.ENDING_CLEAN): "clean",
    int(ingest_pb2.ENDING_EXCEPTION): "exception",
    int(ingest_pb2.ENDING_LOST): "lost",
}


def read_hello(message: ingest_pb2.Hello) -> Hello:
    """Who reports."""
    rank, world_size = small(message.rank, "rank"), small(message.world_size, "world_size")
    require(rank < world_size, f"rank is {rank} of a world size of {world_size}")
    reporting = message.reporting_ranks
    require(reporting <= world_size, f"reporting_ranks is {reporting} of a world size of {world_size}")
    return Hello(
        key=RankKey(canonical_uuid(message.run_id, "run_id"), small(message.attempt, "attempt"), rank),
        project=_given(message.project, "project"),
        workload=_given(message.workload, "workload"),
        world_size=world_size,
        commit=_commit(message.commit),
        hostname=name(message.hostname, "hostname"),
        pid=small(message.pid, "pid"),
        torch_version=name(message.torch_version, "torch_version"),
        agent_version=name(message.agent_version, "agent_version"),
        started_unix_ns=big(message.started_unix_ns, "started_unix_ns"),
        script=name(message.script, "script", PATH_CHARS),
        reporting_ranks=reporting,
    )


def _given(value: str, what: str) -> str:
    require(value.strip() != "", f"{what} is empty")
    return name(value, what)


def _commit(message: ingest_pb2.Commit) -> Commit:
    at_most(message.ancestors, MAX_ANCESTORS, "ancestors")
    ancestors = tuple(commit_sha(sha, "an ancestor") for sha in message.ancestors)
    sha = commit_sha(message.sha, "the commit")
    chain = (sha, *ancestors)
    require(len(set(chain)) == len(chain) and (sha != "" or not ancestors), "the commit's ancestors repeat or lack it")
    branch = name(message.branch, "branch")
    return Commit(sha, branch, message.dirty, ancestors, sentence(message.subject))


def read_frame(message: ingest_pb2.Frame) -> Frame:
    """One numbered record. Whether its hashes are known is for ``known`` to say."""
    content = message.WhichOneof("content")
    match content:
        case "range":
            return Frame(message.number, _step_range(message.range))
        case "facts":
            return Frame(message.number, _facts(message.facts))
        case "completeness":
            return Frame(message.number, _completeness(message.completeness))
        case "capture":
            return Frame(message.number, read_capture(message.capture))
        case _:
            raise MalformedError("the frame holds no record that this release knows")


def _step_range(message: records_pb2.StepRange) -> StepRange:
    first, last = big(message.first_step, "first_step"), big(message.last_step, "last_step")
    require(message.number >= 1, "a range has the number 0")
    require(1 <= first <= last, f"a range goes from step {first} to {last}")
    least = 0 if message.unfinished else 1
    require(
        least <= message.steps <= last - first + 1,
        f"a range from step {first} to {last} has {message.steps} steps",
    )
    require(
        message.statistics_steps <= max(message.steps, 1),
        f"statistics cover {message.statistics_steps} of {message.steps} steps",
    )
    require(not (message.shapes_hash and message.statistics), "a range has both shapes and statistics")
    at_most(message.statistics, MAX_CALLS, "statistics")
    statistics = tuple(_statistics(item) for item in message.statistics)
    require(len({item.call for item in statistics}) == len(statistics), "two statistics of a range are of one call")
    return StepRange(
        number=message.number,
        first_step=first,
        last_step=last,
        steps=message.steps,
        pattern_hash=digest(message.pattern_hash, "pattern_hash"),
        shapes_hash=optional_digest(message.shapes_hash, "shapes_hash"),
        lines_hash=optional_digest(message.lines_hash, "lines_hash"),
        statistics=statistics,
        statistics_steps=message.statistics_steps,
        unfinished=message.unfinished,
    )


def _statistics(message: records_pb2.BytesStatistics) -> BytesStatistics:
    require(message.min <= message.max <= message.sum, "statistics are not in the order min, max, sum")
    require(message.count >= 1, "statistics count no call")
    count, total = big(message.count, "a count of calls"), big(message.sum, "a sum of bytes")
    return BytesStatistics(message.call, count, total, message.min, message.max)


def _facts(message: records_pb2.Facts) -> Facts:
    at_most(message.mesh, MAX_MESH_DIMENSIONS, "dimensions of a mesh")
    mesh = tuple(
        MeshDimension(name(item.name, "the name of a mesh dimension"), small(item.size, "the size of a mesh dimension"))
        for item in message.mesh
    )
    return Facts(
        mesh=mesh,
        device_type=name(message.device_type, "device_type"),
        backend=name(message.backend, "backend"),
        compile_mode=one_of(message.compile_mode, ("eager", "compile"), "compile_mode"),
        modules_hash=optional_digest(message.modules_hash, "modules_hash"),
    )


def _completeness(message: records_pb2.Completeness) -> Completeness:
    at_most(message.groups, MAX_GROUPS, "groups")
    step = big(message.step, "the step of completeness")
    unequal, first = message.unequal_steps, message.first_unequal_step
    require(
        unequal <= step and first <= step and (unequal == 0) == (first == 0),
        f"{unequal} unequal steps up to step {step}, the first of them step {first}",
    )
    groups = tuple(_group_completeness(group) for group in message.groups)
    unattributed = big(message.unattributed, "unattributed")
    return Completeness(step, groups, unattributed, unequal, first, big(message.graph_calls, "graph_calls"))


def _group_completeness(message: records_pb2.GroupCompleteness) -> GroupCompleteness:
    source = name(message.source, "the source of expected calls")
    return GroupCompleteness(
        group=read_group(message.group),
        recorded=big(message.recorded, "recorded calls"),
        expected=big(message.expected, "expected calls") if source else None,
        source=source,
    )


def read_progress(message: ingest_pb2.Progress) -> Progress:
    """The counters of a rank. Zeros of an agent that does not know a counter are None."""
    require(
        message.range_steps <= message.last_step,
        f"the open range has {message.range_steps} steps up to step {message.last_step}",
    )
    return Progress(
        range=message.range,
        last_step=big(message.last_step, "last_step"),
        range_steps=message.range_steps,
        steps=big(message.steps, "steps"),
        calls=big(message.calls, "calls"),
        dropped_calls=big(message.dropped_calls, "dropped_calls"),
        dropped_steps=big(message.dropped_steps, "dropped_steps"),
        reason=sentence(message.reason),
        **_later_counters(message),
    )


def _later_counters(message: ingest_pb2.Progress) -> dict[str, int | None]:
    """Counters that agents of 0.1 do not send. Their absence is a zero that a true counter cannot have.

    Each recorded call is expected or unverified, and a step that took no time did not run.
    """
    counts = {
        "expected_calls": message.expected_calls,
        "unverified_calls": message.unverified_calls,
        "unattributed_calls": message.unattributed_calls,
    }
    cost = {"recording_ns": message.recording_ns, "elapsed_ns": message.elapsed_ns}
    counted = message.expected_calls > 0 or message.unverified_calls > 0
    measured = message.elapsed_ns > 0
    return {
        **{what: big(value, what) if counted else None for what, value in counts.items()},
        **{what: big(value, what) if measured else None for what, value in cost.items()},
    }


def read_goodbye(message: ingest_pb2.Goodbye) -> Goodbye:
    """How a rank ended."""
    ending = _ENDINGS.get(message.ending, "")
    require(ending != "", f"the ending {message.ending} is unknown")
    return Goodbye(ending, sentence(message.detail), read_progress(message.progress))
