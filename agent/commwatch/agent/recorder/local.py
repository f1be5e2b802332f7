"""``record``: the recorder without a service, for notebooks and tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from commwatch.agent.recorder import interpose, meshes, selftest, torch_private
from commwatch.agent.recorder.attribution import Cause
from commwatch.agent.recorder.catalog import Op
from commwatch.agent.recorder.codes import raised_by_signal
from commwatch.agent.recorder.groups import Group
from commwatch.agent.recorder.observer import Identity, Line, Observer, Sizes
from commwatch.agent.recorder.tree import ModuleCounts, tree

MAX_CALLS = 1_000_000
"""Calls kept by one ``record``; later ones are counted in ``dropped`` and nowhere else."""


class RecordError(RuntimeError):
    """Recording cannot work with this torch; the message says what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One collective. Bytes are of this rank; ``lines`` are the user's lines this call identity was seen at."""

    kind: str
    raw_op: str
    phase: str
    module: str
    group: Group
    cause: Cause | None
    dtype: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    bytes_in: int
    bytes_out: int
    lines: tuple[Line, ...]


class record:  # noqa: N801  used like a function: `with record() as r`
    """Record every collective of this process while the block runs.

    Works on any process group, the fake one too, and beside a running agent. May be nested and entered again: a
    later block adds to what was recorded. Raises RecordError on entry when this torch lacks what recording needs.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._observer = Observer(Path.cwd())
        self._calls: list[tuple[int, int]] = []

    def __enter__(self) -> record:
        missing = torch_private.missing()
        if missing:
            raise RecordError(f"cannot record: this torch lacks {', '.join(missing)}")
        wrong = selftest.failure(then=self._see)
        if wrong:
            raise RecordError(f"cannot record: the self-test failed: {wrong}; run `commwatch doctor`")
        meshes.learn_living(self._observer.groups)
        meshes.watch(self._observer.groups)
        self._observer.tracker.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interpose.remove(self._see)
        meshes.unwatch(self._observer.groups)
        self._observer.tracker.remove()

    def _see(self, op: Op, args: tuple[Any, ...]) -> None:
        try:
            identity, sizes, _ = self._observer.observe(op, args)
            if len(self._calls) < MAX_CALLS:
                self._calls.append((identity, sizes))
            else:
                self.dropped += 1
        except Exception as error:  # the recorder may fail, the collective may not
            if raised_by_signal(error):
                raise
            self.dropped += 1

    @property
    def graph_calls(self) -> int:
        """Collectives that were captured into a CUDA graph: recorded once. Replays of the graph are not observable, so
        that unless this is 0, all counts are a lower bound."""
        return self._observer.graph_calls

    def counts(self) -> dict[str, int]:
        """Number of collectives by canonical kind, such as ``{"all_gather": 2}``; kinds that never ran are absent."""
        identities = self._observer.identities
        return dict(Counter(identities[identity].op.kind for identity, _ in self._calls))

    def calls(self) -> list[RecordedCall]:
        """Every collective, in order of issue."""
        identities, sizes = self._observer.identities, self._observer.sizes
        return [_call(identities[identity], sizes[size]) for identity, size in self._calls]

    def modules(self) -> ModuleCounts:
        """The tree of modules with own and total counts by phase and kind. As text, it is indented."""
        identities = [self._observer.identities[identity] for identity, _ in self._calls]
        calls = ((identity.module, identity.phase, identity.op.kind) for identity in identities)
        return tree(calls, frozenset(self._observer.names.roots))

    def __str__(self) -> str:
        """A table: one row for each distinct call, with its count and bytes."""
        return table(self.calls(), self.dropped, self.graph_calls)


def _call(identity: Identity, sizes: Sizes) -> RecordedCall:
    return RecordedCall(
        identity.op.kind,
        identity.op.name,
        identity.phase,
        identity.module,
        identity.group,
        identity.cause,
        identity.dtype,
        sizes.inputs,
        sizes.outputs,
        sizes.bytes_in,
        sizes.bytes_out,
        tuple(identity.lines),
    )


def table(calls: list[RecordedCall], dropped: int = 0, graph_calls: int = 0) -> str:
    """Rows by phase, kind, group, module, cause and element type, in order of first issue; then what they leave out."""
    rows: dict[tuple[Any, ...], list[Any]] = {}
    for call in calls:
        key = (call.phase, call.kind, str(call.group), call.module, call.cause, call.dtype)
        row = rows.setdefault(key, [0, 0, call.lines])
        row[0] += 1
        row[1] += max(call.bytes_in, call.bytes_out)
    header = ("count", "bytes", "phase", "kind", "group", "module", "dtype", "cause", "line")
    cells = [header]
    for (phase, kind, group, module, cause, dtype), (count, size, lines) in rows.items():
        cells.append(
            (
                str(count),
                str(size),
                phase,
                kind,
                group,
                module or "-",
                dtype or "-",
                str(cause) if cause else "-",
                str(lines[0]) if lines else "-",
            )
        )
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numbers = 2
    text = [
        "  ".join(
            cell.rjust(width) if column < numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    text.append(f"{len(calls)} collectives" + (f", {dropped} dropped" if dropped else ""))
    if graph_calls:
        captured = f"{graph_calls} collective{' was' if graph_calls == 1 else 's were'} captured"
        text.append(f"replays of CUDA graphs are not observable: {captured}")
    return "\n".join(text)
