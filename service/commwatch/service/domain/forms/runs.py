"""Runs, their ranks and their steady step."""

from __future__ import annotations

from collections.abc import Iterable

from commwatch.service.domain.completeness import RecordingCost, RunCompleteness
from commwatch.service.domain.forms.numbers import Form, bytes_to_json, fraction_to_json
from commwatch.service.domain.records import Cause, Completeness, Group, Line
from commwatch.service.domain.runs import Environment, Rank, Run
from commwatch.service.domain.sites import Site
from commwatch.service.domain.steady import LeftOut
from commwatch.service.domain.steady_run import SteadyRun, SteadySite
from commwatch.service.domain.wording import cost_in_words, short_id


def run_to_json(run: Run) -> Form:
    """One run."""
    accepted = None
    if run.accepted_reason is not None:
        accepted = {"reason": run.accepted_reason, "author": run.accepted_by, "unix_ns": run.accepted_unix_ns}
    return {
        "id": run.id,
        "short_id": short_id(run.id),
        "project": run.project,
        "workload": run.workload,
        "commit": run.commit_sha,
        "subject": run.commit_subject,
        "branch": run.branch,
        "dirty": run.dirty,
        "script": run.script,
        "state": run.state,
        "attempt": run.attempt,
        "world_size": run.world_size,
        "expected_ranks": run.expected_ranks,
        "environment": environment_to_json(run.environment),
        "started_unix_ns": run.started_unix_ns,
        "last_seen_unix_ns": run.last_seen_unix_ns,
        "ended_unix_ns": run.ended_unix_ns,
        "steps": run.steps,
        "calls": run.calls,
        "open_alerts": run.open_alerts,
        "accepted": accepted,
    }


def environment_to_json(environment: Environment | None) -> Form | None:
    """What must be equal for a fair comparison."""
    if environment is None:
        return None
    return {
        "torch_version": environment.torch_version,
        "backend": environment.backend,
        "device_type": environment.device_type,
        "world_size": environment.world_size,
        "mesh": [{"name": dimension.name, "size": dimension.size} for dimension in environment.mesh],
        "compile_mode": environment.compile_mode,
    }


def rank_to_json(rank: Rank) -> Form:
    """One rank of the newest attempt."""
    names = ("rank", "hostname", "pid", "state", "detail", "steps", "calls", "stored_steps")
    more = ("dropped_calls", "dropped_steps", "rejected_frames", "acked_frame", "last_seen_unix_ns")
    later = ("expected_calls", "unverified_calls", "unattributed_calls", "recording_ns", "elapsed_ns")
    counters = {name: getattr(rank, name) for name in names + more + later}
    return {**counters, "completeness": rank_completeness_to_json(rank.completeness)}


def rank_completeness_to_json(found: Completeness | None) -> Form | None:
    """What one rank recorded against what a second source counted; None when it never said."""
    if found is None:
        return None
    return {
        "step": found.step,
        "unattributed": found.unattributed,
        "unequal_steps": found.unequal_steps,
        "first_unequal_step": found.first_unequal_step or None,
        "graph_calls": found.graph_calls,
        "groups": [
            {
                "group": group_to_json(item.group),
                "recorded": item.recorded,
                "expected": item.expected,
                "source": item.source or None,
            }
            for item in found.groups
        ],
    }


def completeness_to_json(found: RunCompleteness | None) -> Form | None:
    """The same over the ranks of a run."""
    if found is None:
        return None
    return {
        "ranks": list(found.ranks),
        "silent_ranks": list(found.silent),
        "recorded": found.recorded,
        "expected": found.expected,
        "unattributed": found.unattributed,
        "unverified": [{"group": group_to_json(item.group), "recorded": item.recorded} for item in found.unverified],
        "different": [
            {
                "rank": item.rank,
                "group": group_to_json(item.group),
                "recorded": item.recorded,
                "expected": item.expected,
            }
            for item in found.different
        ],
        "unequal": [{"rank": item.rank, "steps": item.steps, "first_step": item.first_step} for item in found.unequal],
        "graphs": [{"rank": item.rank, "calls": item.calls} for item in found.graphs],
    }


def cost_to_json(cost: RecordingCost | None) -> Form | None:
    """What recording took."""
    if cost is None:
        return None
    return {
        "ranks": cost.ranks,
        "steps": cost.steps,
        "recording_ns": cost.recording_ns,
        "elapsed_ns": cost.elapsed_ns,
        "ns_per_step": fraction_to_json(cost.ns_per_step),
        "part_of_step": fraction_to_json(cost.part_of_step),
        "text": cost_in_words(cost),
    }


def steady_to_json(steady: SteadyRun) -> Form:
    """One ordinary step, site by site."""
    return {
        "calls": steady.calls,
        "payload": bytes_to_json(steady.payload),
        "classes": [
            {"ranks": list(cls.ranks), "pattern": cls.pattern_hash, "steps": cls.steps} for cls in steady.classes
        ],
        "sites": [steady_site_to_json(site) for site in steady.sites],
        "left_out": left_out_to_json(steady.left_out),
        "modules_known": steady.inventory is not None,
    }


def steady_site_to_json(site: SteadySite) -> Form:
    """One site in one step, summed over ranks."""
    return {
        **site_to_json(site.site),
        "calls": site.calls,
        "ranks": site.ranks,
        "min_calls": site.min_calls,
        "max_calls": site.max_calls,
        "payload": bytes_to_json(site.payload),
        "modules": site.modules,
        "raw_ops": list(site.raw_ops),
        "lines": lines_to_json(site.lines),
    }


def site_to_json(site: Site) -> Form:
    """A call's identity over ranks and commits."""
    return {
        "site": site.hash,
        "phase": site.phase,
        "kind": site.kind,
        "group": group_to_json(site.group),
        "module": site.module,
        "cause": cause_to_json(site.cause),
        "dtype": site.dtype,
    }


def group_to_json(group: Group) -> Form:
    """A process group."""
    return {"name": group.name, "size": group.size, "stride": group.stride}


def cause_to_json(cause: Cause | None) -> Form | None:
    """The redistribute behind a call."""
    if cause is None:
        return None
    return {"src": cause.src, "dst": cause.dst, "implicit": cause.implicit, "op": cause.op}


def lines_to_json(lines: Iterable[Line]) -> list[Form]:
    """Lines of the user's program."""
    return [{"file": line.file, "line": line.line, "function": line.function} for line in lines]


def left_out_to_json(left_out: Iterable[LeftOut]) -> list[Form]:
    """What ranks did beside their steady pattern."""
    names = ("warm_up_steps", "other_steps", "other_patterns", "unordered_steps", "unfinished", "unstored_steps")
    return [{"ranks": list(found.ranks), **{name: getattr(found, name) for name in names}} for found in left_out]
