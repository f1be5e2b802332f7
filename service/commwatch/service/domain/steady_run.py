"""What an ordinary step of a run communicates, site by site, summed over its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from commwatch.service.domain.records import Call, Definition, Line, Lines, Modules, Pattern, Shapes, StepRange
from commwatch.service.domain.runs import Environment, Rank, Run
from commwatch.service.domain.sites import Site, site_of
from commwatch.service.domain.steady import Choice, LeftOut, NotSteady, RankSteady, Reason

MAX_LINES = 4
"""Lines of the user's program that are shown for one site."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Payload bytes of one step. ``per_step`` is None when withheld; ``reason`` says why.

    When ``varies``, shapes changed from step to step and ``per_step`` is the mean over the steps that were measured.
    """

    per_step: Fraction | None
    varies: bool = False
    reason: str = ""

    @property
    def exact(self) -> int | None:
        """Bytes of every single step; None when withheld or varying."""
        return None if self.per_step is None or self.varies else int(self.per_step)


NO_BYTES = Payload(Fraction(0))


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that did the same: equal pattern, shapes, lines and modules. ``steps`` is the least of theirs."""

    ranks: tuple[int, ...]
    pattern_hash: str
    steps: int


@dataclass(frozen=True, slots=True)
class SteadySite:
    """One site in one step.

    ``calls`` and ``payload`` are summed over ranks; ``min_calls`` and ``max_calls`` are over the ``ranks`` that have
    the site. ``calls_by_class`` and ``modules_by_class`` follow the run's classes: calls of one of its ranks, and
    distinct modules (layer numbers kept) of one of its ranks. ``modules`` counts them over all ranks.
    """

    site: Site
    calls: int
    ranks: int
    min_calls: int
    max_calls: int
    payload: Payload
    modules: int
    lines: tuple[Line, ...]
    raw_ops: tuple[str, ...]
    calls_by_class: tuple[int, ...]
    modules_by_class: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """An ordinary step of a run. ``inventory`` counts modules by folded name over all ranks; None when unknown."""

    run: Run
    environment: Environment
    classes: tuple[RankClass, ...]
    sites: tuple[SteadySite, ...]
    inventory: dict[str, int] | None
    left_out: tuple[LeftOut, ...]

    @property
    def calls(self) -> int:
        """Calls per step, over all ranks."""
        return sum(site.calls for site in self.sites)

    @property
    def payload(self) -> Payload:
        """Payload bytes per step, over all ranks and sites."""
        return add_payloads([site.payload for site in self.sites])


def add_payloads(parts: Sequence[Payload]) -> Payload:
    """Their sum: withheld when one of them is, varying when one of them does."""
    total = Fraction(0)
    for part in parts:
        if part.per_step is None:
            return part
        total += part.per_step
    return Payload(total, any(part.varies for part in parts))


def definition_hashes(choice: Choice, ranks: Sequence[Rank]) -> set[str]:
    """Hashes of every definition ``build`` needs."""
    hashes: set[str | None] = {rank.facts.modules_hash for rank in ranks if rank.facts is not None}
    for rank in choice.ranks:
        for step_range in rank.ranges:
            hashes |= {step_range.pattern_hash, step_range.shapes_hash, step_range.lines_hash}
    return {found for found in hashes if found}


def build(
    run: Run, ranks: Sequence[Rank], choice: Choice, definitions: Mapping[str, Definition]
) -> SteadyRun | NotSteady:
    """Sum the steady patterns. Ranks that did the same are summed once and multiplied."""
    if run.environment is None:
        reason = Reason("no_environment", "No rank has reported its environment.")
        return NotSteady((reason,), passing=run.state == "running")
    modules_by_rank = {rank.rank: rank.facts.modules_hash if rank.facts else None for rank in ranks}
    equal: dict[tuple[object, ...], list[RankSteady]] = {}
    for steady in choice.ranks:
        equal.setdefault((*steady.content, modules_by_rank.get(steady.rank)), []).append(steady)
    summaries = [_summarize(members, definitions) for members in equal.values()]
    classes = tuple(
        RankClass(
            tuple(member.rank for member in members), members[0].pattern_hash, min(member.steps for member in members)
        )
        for members in equal.values()
    )
    sites = sorted({site for summary in summaries for site in summary}, key=site_order)
    built = tuple(_add_up(site, classes, [summary.get(site) for summary in summaries]) for site in sites)
    inventory = _inventory(classes, modules_by_rank, definitions)
    return SteadyRun(run, run.environment, classes, built, inventory, choice.left_out)


@dataclass(slots=True)
class _RankSite:
    """One site on one rank."""

    calls: int
    modules: set[str]
    raw_ops: dict[str, None]
    lines: dict[Line, None]
    payload: Payload


def _summarize(members: Sequence[RankSteady], definitions: Mapping[str, Definition]) -> dict[Site, _RankSite]:
    """The sites of one of several equal ranks."""
    steady = members[0]
    pattern = definitions[steady.pattern_hash]
    assert isinstance(pattern, Pattern)
    counts = Counter(pattern.order)
    payloads = _payloads(pattern, steady.ranges, definitions)
    found_lines = definitions.get(steady.ranges[-1].lines_hash or "")
    lines = found_lines.calls if isinstance(found_lines, Lines) else ()
    found: dict[Site, _RankSite] = {}
    for index, call in enumerate(pattern.calls):
        site = site_of(call)
        entry = found.get(site)
        if entry is None:
            entry = found[site] = _RankSite(0, set(), {}, {}, NO_BYTES)
        entry.calls += counts[index]
        entry.modules |= _named(call)
        entry.raw_ops[call.raw_op] = None
        entry.lines.update(dict.fromkeys(lines[index] if index < len(lines) else ()))
        entry.payload = add_payloads([entry.payload, payloads[index]])
    return found


def _named(call: Call) -> set[str]:
    return {call.module} if call.module else set()


def _payloads(pattern: Pattern, ranges: Sequence[StepRange], definitions: Mapping[str, Definition]) -> list[Payload]:
    """Payload of each of the pattern's calls in one step of one rank."""
    hashes = {step_range.shapes_hash for step_range in ranges}
    varies = len(hashes) > 1 or None in hashes
    totals = [0] * len(pattern.calls)
    steps = 0
    for step_range in ranges:
        if step_range.shapes_hash is None:
            steps += step_range.statistics_steps
            for entry in step_range.statistics:
                if entry.call < len(totals):
                    totals[entry.call] += entry.sum
            continue
        shapes = definitions.get(step_range.shapes_hash)
        if not isinstance(shapes, Shapes) or len(shapes.order) != len(pattern.order):
            return [Payload(None, reason="The shapes of some steps have not arrived.")] * len(totals)
        # With one Shapes every step is equal, however many there were: the division below would only undo this.
        times = step_range.steps if varies else 1
        steps = steps + times if varies else 1
        if not varies and step_range is not ranges[0]:
            continue
        for call, shape in zip(pattern.order, shapes.order, strict=True):
            totals[call] += times * shapes.shapes[shape].payload_bytes
    if steps == 0:
        return [Payload(None, reason="Sizes vary and no step of them was measured yet.")] * len(totals)
    return [Payload(Fraction(total, steps), varies) for total in totals]


def _add_up(site: Site, classes: Sequence[RankClass], parts: Sequence[_RankSite | None]) -> SteadySite:
    """One site over all classes."""
    having = [(len(cls.ranks), part) for cls, part in zip(classes, parts, strict=True) if part is not None]
    payload = add_payloads([_times(part.payload, ranks) for ranks, part in having])
    lines: dict[Line, None] = {}
    raw_ops: dict[str, None] = {}
    modules: set[str] = set()
    for _, part in having:
        lines.update(part.lines)
        raw_ops.update(part.raw_ops)
        modules |= part.modules
    return SteadySite(
        site=site,
        calls=sum(ranks * part.calls for ranks, part in having),
        ranks=sum(ranks for ranks, _ in having),
        min_calls=min(part.calls for _, part in having),
        max_calls=max(part.calls for _, part in having),
        payload=payload,
        modules=len(modules),
        lines=tuple(lines)[:MAX_LINES],
        raw_ops=tuple(raw_ops),
        calls_by_class=tuple(part.calls if part else 0 for part in parts),
        modules_by_class=tuple(len(part.modules) if part else 0 for part in parts),
    )


def _times(payload: Payload, ranks: int) -> Payload:
    return payload if payload.per_step is None else Payload(payload.per_step * ranks, payload.varies)


def _inventory(
    classes: Sequence[RankClass], modules_by_rank: Mapping[int, str | None], definitions: Mapping[str, Definition]
) -> dict[str, int] | None:
    """None as soon as one rank's modules are unknown: a partial inventory would make layers look added."""
    total: Counter[str] = Counter()
    for cls in classes:
        modules = definitions.get(modules_by_rank.get(cls.ranks[0]) or "")
        if not isinstance(modules, Modules):
            return None
        for name, count in modules.counts:
            total[name] += count * len(cls.ranks)
    return dict(sorted(total.items()))


def site_order(site: Site) -> tuple[object, ...]:
    """Sort key: in the order of a step's phases, then by module and kind."""
    cause = site.cause
    return (
        _PHASES.get(site.phase, len(_PHASES)),
        site.module,
        site.kind,
        (site.group.name, site.group.size, site.group.stride),
        (cause.src, cause.dst, cause.op, cause.implicit) if cause else (),
        site.dtype,
    )


_PHASES = {phase: place for place, phase in enumerate(("forward", "recompute", "backward", "clip", "optimizer"))}
