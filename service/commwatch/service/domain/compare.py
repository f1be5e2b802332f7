"""Comparison of two runs, like with like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from commwatch.service.domain.changes import Change, Comparison, NoVerdict
from commwatch.service.domain.records import MeshDimension
from commwatch.service.domain.runs import Environment, Run
from commwatch.service.domain.sites import Site
from commwatch.service.domain.steady import Reason
from commwatch.service.domain.steady_run import NO_BYTES, SteadyRun, SteadySite, site_order


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that must be equal and is not, in words."""

    field: str
    base: str
    head: str


def environment_differences(base: Environment, head: Environment) -> tuple[Difference, ...]:
    """The fields that differ, in the order of ``Environment``; empty for equal environments."""
    fields = ("torch_version", "backend", "device_type", "world_size", "mesh", "compile_mode")
    return tuple(
        Difference(name, _in_words(getattr(base, name)), _in_words(getattr(head, name)))
        for name in fields
        if getattr(base, name) != getattr(head, name)
    )


def incomparable(base: Run, head: Run) -> tuple[Reason, ...]:
    """Why two runs must not be compared, whatever they ran: other project or workload, or unequal environment."""
    reasons = []
    for name in ("project", "workload"):
        ours, theirs = getattr(base, name), getattr(head, name)
        if ours != theirs:
            reasons.append(Reason(f"different_{name}", f"The {name} differs: base {ours}, head {theirs}."))
    if base.environment is not None and head.environment is not None:
        reasons += [
            Reason("different_environment", f"{found.field} differs: base {found.base}, head {found.head}.")
            for found in environment_differences(base.environment, head.environment)
        ]
    return tuple(reasons)


def compare(base: SteadyRun, head: SteadyRun) -> Comparison | NoVerdict:
    """Compare site by site, per step and summed over ranks.

    A site whose calls follow the number of modules of its folded name, where that number differs, is ``scaled`` and
    not a change: the model is deeper or shallower. Where the number is equal or unknown, calls are compared as is.
    """
    reasons = incomparable(base.run, head.run)
    if reasons:
        return NoVerdict(reasons)
    pairs = _pair_classes(base, head)
    if pairs is None:
        text = "The runs were reported by different ranks."
        return NoVerdict((Reason("different_ranks", text),))
    of_base = {site.site: site for site in base.sites}
    of_head = {site.site: site for site in head.sites}
    changes: list[Change] = []
    scaled: list[Change] = []
    for site in sorted(of_base.keys() | of_head.keys(), key=site_order):
        pair = _Pair(site, of_base.get(site), of_head.get(site), base, head, pairs)
        kind = _kind_of_change(pair)
        if kind == "scaled":
            scaled.append(_change("count", pair))
        elif kind is not None:
            changes.append(_change(kind, pair))
    return Comparison(base, head, tuple(changes), tuple(scaled))


def _in_words(value: str | int | tuple[MeshDimension, ...]) -> str:
    if isinstance(value, tuple):
        return " x ".join(f"{dimension.name}={dimension.size}" for dimension in value) or "none"
    return str(value) or "unknown"


def _pair_classes(base: SteadyRun, head: SteadyRun) -> Counter[tuple[int, int]] | None:
    """How many ranks are in each pair of classes; None unless both runs have the same ranks."""
    in_base = {rank: index for index, cls in enumerate(base.classes) for rank in cls.ranks}
    in_head = {rank: index for index, cls in enumerate(head.classes) for rank in cls.ranks}
    if in_base.keys() != in_head.keys():
        return None
    return Counter((in_base[rank], in_head[rank]) for rank in in_base)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One site in both runs, and how the classes of their ranks meet."""

    site: Site
    base: SteadySite | None
    head: SteadySite | None
    base_run: SteadyRun
    head_run: SteadyRun
    classes: Counter[tuple[int, int]]

    @property
    def instances(self) -> tuple[int | None, int | None]:
        """Modules of the site's folded name in both runs."""
        if not self.site.module:
            return None, None
        both = (self.base_run.inventory, self.head_run.inventory)
        base, head = (None if found is None else found.get(self.site.module) for found in both)
        return base, head

    def deltas(self) -> list[tuple[int, int, int]]:
        """For each pair of classes that differs: number of ranks, calls that came, layers (0: not the same ones)."""
        found = []
        for (base, head), ranks in self.classes.items():
            base_calls, base_modules = _of_class(self.base, base)
            head_calls, head_modules = _of_class(self.head, head)
            if base_calls != head_calls:
                same_layers = base_modules == head_modules or 0 in (base_calls, head_calls)
                found.append((ranks, head_calls - base_calls, max(base_modules, head_modules) if same_layers else 0))
        return found


def _of_class(site: SteadySite | None, index: int) -> tuple[int, int]:
    return (site.calls_by_class[index], site.modules_by_class[index]) if site else (0, 0)


def _kind_of_change(pair: _Pair) -> str | None:
    base, head = pair.base, pair.head
    if base is None or head is None:
        return "added" if base is None else "removed"
    base_instances, head_instances = pair.instances
    if base_instances and head_instances and base_instances != head_instances:
        if base.calls * head_instances == head.calls * base_instances:
            return "scaled"
        return "count"
    if pair.deltas():
        return "count"
    base_bytes, head_bytes = base.payload.exact, head.payload.exact
    if base_bytes is not None and head_bytes is not None and base_bytes != head_bytes:
        return "bytes"
    return None


def _change(kind: str, pair: _Pair) -> Change:
    base, head = pair.base, pair.head
    deltas = pair.deltas()
    base_instances, head_instances = pair.instances
    shown = head or base
    assert shown is not None
    return Change(
        change=kind,
        site=pair.site,
        base_calls=base.calls if base else 0,
        head_calls=head.calls if head else 0,
        delta_per_rank=_same([calls for _, calls, _ in deltas]),
        delta_per_layer=_per_layer(pair.site, deltas),
        ranks=sum(ranks for ranks, _, _ in deltas),
        of_ranks=sum(pair.classes.values()),
        base_payload=base.payload if base else NO_BYTES,
        head_payload=head.payload if head else NO_BYTES,
        base_modules=base.modules if base else 0,
        head_modules=head.modules if head else 0,
        base_instances=base_instances,
        head_instances=head_instances,
        lines=shown.lines,
    )


def _per_layer(site: Site, deltas: Sequence[tuple[int, int, int]]) -> int | None:
    if "*" not in site.module.split("."):
        return None
    parts = [calls // layers if layers and calls % layers == 0 else None for _, calls, layers in deltas]
    return None if None in parts else _same([part for part in parts if part is not None])


def _same(values: Sequence[int]) -> int | None:
    """The value all of them have; None when they differ or there is none."""
    return values[0] if values and len(set(values)) == 1 else None
