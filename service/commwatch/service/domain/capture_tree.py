"""The tree of a captured step: which records to show, and how they stand below each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from commwatch.service.domain.captures import CapturedCall, CapturedRecord, CapturedStep

NOISE_LEVELS = (0, 1, 2, 3)
"""0: collectives. 1: and modules, redistributes, and DTensor ops that are not trivial. 2: and all but trivial ops.
3: everything. At every level with the records above them."""

TRIVIAL_OPS = frozenset({"detach", "t", "view", "_to_copy", "as_strided", "transpose"})
"""Ops that only look at or copy what is there."""

_OPS = frozenset({"torch_function", "dtensor_op", "op", "fake_op", "local_tensor_op", "async_op"})


@dataclass(frozen=True, slots=True)
class Filter:
    """What to show: records that meet every condition, and those above them.

    ``kinds`` are kinds of records or of collectives; empty for all. ``module`` is a glob: modules that match with all
    that ran in them, and collectives attributed to them. ``depth`` is the number of levels; None for all.
    """

    kinds: frozenset[str] = frozenset()
    module: str | None = None
    noise: int = 3
    depth: int | None = None


def parents_of(records: Sequence[CapturedRecord]) -> list[int | None]:
    """Index of each record's parent: the nearest before it that is less deep; None at the top."""
    parents: list[int | None] = []
    above: list[int] = []
    for index, record in enumerate(records):
        while above and records[above[-1]].depth >= record.depth:
            above.pop()
        parents.append(above[-1] if above else None)
        above.append(index)
    return parents


def path_to(records: Sequence[CapturedRecord], index: int) -> list[int]:
    """A record and all above it, the topmost first."""
    path = [index]
    depth = records[index].depth
    for above in range(index - 1, -1, -1):
        if records[above].depth < depth:
            depth = records[above].depth
            path.append(above)
    return path[::-1]


def select(captured: CapturedStep, wanted: Filter) -> list[int]:
    """Indices of the records to show, in order."""
    records, calls = captured.records, captured.calls
    parents = parents_of(records)
    by_call = [_call_matches(call, wanted) for call in calls]
    inside = _inside_modules(captured, parents, wanted.module)
    keep = [False] * len(records)
    for index in range(len(records) - 1, -1, -1):
        record = records[index]
        if not keep[index] and by_call[record.call] and inside[index]:
            keep[index] = True
        parent = parents[index]
        if keep[index] and parent is not None:
            keep[parent] = True
    levels = _levels(parents)
    return [index for index, kept in enumerate(keep) if kept and (wanted.depth is None or levels[index] < wanted.depth)]


def is_trivial(call: CapturedCall) -> bool:
    """Whether a call is one of an op of TRIVIAL_OPS: ``aten::transpose.int``, ``torch.Tensor.detach``."""
    if call.kind not in _OPS:
        return False
    namespace, _, rest = call.name.rpartition("::")
    op = rest.split(".")[0] if namespace else rest.rpartition(".")[2]
    return op in TRIVIAL_OPS


def _call_matches(call: CapturedCall, wanted: Filter) -> bool:
    kinds = {call.kind, *(item.kind for item in call.collectives)}
    if wanted.kinds and not kinds & wanted.kinds:
        return False
    if call.collectives or wanted.noise >= 3:
        return True
    if wanted.noise == 2:
        return not is_trivial(call)
    if wanted.noise == 1:
        return call.kind in ("module", "redistribute") or (call.kind == "dtensor_op" and not is_trivial(call))
    return False


def _inside_modules(captured: CapturedStep, parents: Sequence[int | None], glob: str | None) -> list[bool]:
    """Of each record whether it ran in a module that matches, or issued a collective that is attributed to one."""
    if glob is None:
        return [True] * len(captured.records)
    is_module = [call.kind == "module" and fnmatchcase(_module(call.name), glob) for call in captured.calls]
    attributed = [any(fnmatchcase(item.module, glob) for item in call.collectives) for call in captured.calls]
    subtree: list[bool] = []
    for record, parent in zip(captured.records, parents, strict=True):
        subtree.append(is_module[record.call] or (parent is not None and subtree[parent]))
    return [within or attributed[record.call] for within, record in zip(subtree, captured.records, strict=True)]


def _module(name: str) -> str:
    """The module's own name, without the note that it ran in backward."""
    return name.removesuffix(" (backward)")


def _levels(parents: Sequence[int | None]) -> list[int]:
    """How many records stand above each: what ``depth`` counts, whatever depths the rank wrote."""
    levels: list[int] = []
    for parent in parents:
        levels.append(0 if parent is None else levels[parent] + 1)
    return levels
