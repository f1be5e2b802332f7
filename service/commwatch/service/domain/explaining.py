"""Why a call is there: the chain from the user's line to the collective, and where a capture shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from commwatch.service.domain.capture_text import group_text, render_call
from commwatch.service.domain.capture_tree import path_to
from commwatch.service.domain.captures import CapturedCall, CapturedCollective, CapturedStep, CapturedTensor
from commwatch.service.domain.records import KINDS, Cause
from commwatch.service.domain.sites import Site, fold
from commwatch.service.domain.steady_run import SteadySite
from commwatch.service.domain.wording import payload_in_words, short_site

MIN_SITE_PREFIX = 4
"""Characters of a site's id that a prefix must have."""

_SHORT_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "b8",
    "complex64": "c64",
    "complex128": "c128",
}


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the chain. ``name`` is line, module, op, redistribute, collective or step."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class TreePath:
    """The records above and including one of a capture, the topmost first: depths and texts."""

    rank: int
    step: int
    records: tuple[tuple[int, str], ...]


def matching_sites(sites: Sequence[SteadySite], text: str) -> list[SteadySite]:
    """The sites ``text`` stands for: the start of an id, or ``[kind:]module``, where the module may be a glob.

    A module's name as it is, or with its layer numbers, goes before a glob.
    """
    if len(text) >= MIN_SITE_PREFIX:
        by_id = [site for site in sites if site.site.hash.startswith(text.lower())]
        if by_id:
            return by_id
    kind, colon, module = text.partition(":")
    if not colon or kind not in KINDS:
        kind, module = "", text
    of_kind = [site for site in sites if not kind or site.site.kind == kind]
    exact = [site for site in of_kind if site.site.module in (module, fold(module))]
    return exact or [site for site in of_kind if fnmatchcase(site.site.module, module)]


def site_in_words(site: Site) -> str:
    """``3f2a91bc (forward all_gather in layers.*.wo)``: enough to choose between sites."""
    cause = f", {site.cause.src} -> {site.cause.dst}" if site.cause is not None else ""
    where = f"in {site.module}" if site.module else "without a module"
    return f"{short_site(site.hash)} ({site.phase} {site.kind} {where} on {site.group.name}{cause})"


def chain(site: SteadySite) -> tuple[Link, ...]:
    """From the user's line to the collective. What is unknown is said."""
    identity, cause = site.site, site.site.cause
    shown = [f"{line.file}:{line.line} in {line.function}" for line in site.lines]
    modules = f" ({site.modules} modules)" if site.modules > 1 else ""
    group = group_text(identity.group)
    raw = f" ({', '.join(site.raw_ops)})" if site.raw_ops else ""
    kind = f"{identity.kind}{raw} on {group}, {identity.phase}, {identity.dtype or 'no element type'}"
    return (
        Link("line", "; also ".join(shown) or "no line of the program known"),
        Link("module", f"{identity.module}{modules}" if identity.module else "no module known"),
        Link("op", _op(cause)),
        Link("redistribute", _redistribute(cause)),
        Link("collective", kind),
        Link("step", _per_step(site)),
    )


def remedy(site: Site) -> str:
    """What usually helps, where the cause says enough; empty otherwise."""
    cause = site.cause
    if cause is None or not cause.implicit or not cause.op:
        return ""
    if "P(" in cause.src:
        return (
            f"{cause.op} was given partial results, {cause.src}, and runs on {cause.dst}: they have to be reduced. "
            "What usually helps is to reduce them once where several ops use them, or to shards where the ops that "
            "follow run on shards."
        )
    return (
        f"{cause.op} was given an argument with the placements {cause.src} and runs on {cause.dst}. "
        f"What usually helps is to make that argument with {cause.dst}, to give the op's other arguments placements "
        f"with which it runs on {cause.src}, or, where several ops use it, to redistribute it once for all of them."
    )


def find_in_capture(captured: CapturedStep, site: Site) -> TreePath | None:
    """The path to the first record that issued a call of the site; None when no record did."""
    possible = [any(_same(item, site) for item in call.collectives) for call in captured.calls]
    for index, record in enumerate(captured.records):
        if not possible[record.call]:
            continue
        path = path_to(captured.records, index)
        calls = [captured.calls[captured.records[above].call] for above in path]
        if _same_cause(calls, site.cause) and _same_dtype(calls[-1], site.dtype):
            depths = (captured.records[above].depth for above in path)
            texts = (render_call(call) for call in calls)
            return TreePath(captured.summary.rank, captured.summary.step, tuple(zip(depths, texts, strict=True)))
    return None


def _op(cause: Cause | None) -> str:
    if cause is None:
        return "no op known"
    return cause.op or "no op: the program asked for the redistribute itself"


def _redistribute(cause: Cause | None) -> str:
    if cause is None:
        return "no redistribute known"
    return f"{'implicit' if cause.implicit else 'explicit'}, {cause.src} -> {cause.dst}"


def _per_step(site: SteadySite) -> str:
    per_rank = str(site.max_calls) if site.min_calls == site.max_calls else f"{site.min_calls} to {site.max_calls}"
    ranks = f"{site.ranks} rank{'' if site.ranks == 1 else 's'}"
    calls = f"{site.calls} call{'' if site.calls == 1 else 's'} a step over {ranks} ({per_rank} on each)"
    payload = payload_in_words(site.payload)
    return f"{calls}, {'an unknown payload' if payload == 'unknown' else f'{payload} payload'}"


def _same(item: CapturedCollective, site: Site) -> bool:
    return (item.phase, item.kind, item.group, fold(item.module)) == (site.phase, site.kind, site.group, site.module)


def _same_cause(calls: Sequence[CapturedCall], cause: Cause | None) -> bool:
    """Whether the redistribute above a record is the site's cause: equal ends, and decided by op dispatch or not."""
    above = [call.redistribute for call in calls if call.redistribute is not None]
    if not above or cause is None:
        return not above and cause is None
    # Within backward a redistribute is not marked as explicit: a decision above it is what tells.
    implicit = any(found.argument is not None for found in above)
    nearest = above[-1]
    return (_plain(nearest.src), _plain(nearest.dst), implicit) == (
        _plain(cause.src),
        _plain(cause.dst),
        cause.implicit,
    )


def _plain(placements: str) -> str:
    """Without what differs between the two ways to write several placements: ``[S(0), R]`` and ``S(0)R``."""
    return placements.replace("[", "").replace("]", "").replace(",", "").replace(" ", "")


def _same_dtype(call: CapturedCall, dtype: str) -> bool:
    """False only where the record shows a tensor of another element type."""
    short = _SHORT_DTYPES.get(dtype)
    shown = [value.value.dtype for value in call.arguments if isinstance(value.value, CapturedTensor)]
    return short is None or not shown or short in shown
