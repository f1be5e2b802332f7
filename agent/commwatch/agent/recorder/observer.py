"""Turns one dispatcher call into small integers: which call it was, and of which sizes."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from commwatch.agent.recorder import torch_private
from commwatch.agent.recorder.attribution import Attribution, Cause
from commwatch.agent.recorder.catalog import Op
from commwatch.agent.recorder.groups import UNKNOWN, Group, Groups
from commwatch.agent.recorder.modules import ModuleNames, ModuleTracker
from commwatch.agent.recorder.regions import Place
from commwatch.agent.recorder.torch_private import unbox_group, without_torch_function

MAX_LINES = 4
"""Lines kept for one call identity."""

MAX_SIZES = 65_536
"""Distinct sizes known at once; a job whose shapes never repeat starts the table anew at a step's end."""

MAX_IDENTITIES = 50_000
"""Distinct calls known; beyond it (names that never repeat) new ones are kept without module and cause."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the user's program; ``file`` is relative to the program's root."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Such as ``model.py:88 (forward)``."""
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(slots=True)
class Identity:
    """What does not change from step to step about a call, and the lines it was seen at."""

    op: Op
    group: Group
    phase: str
    module: str
    cause: Cause | None
    dtype: str
    lines: list[Line] = field(default_factory=list)
    seen: set[Hashable] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes of a call's tensors and their bytes, on this rank."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    bytes_in: int
    bytes_out: int

    @property
    def payload_bytes(self) -> int:
        """The larger of input and output: the "size" of nccl-tests for every kind."""
        return max(self.bytes_in, self.bytes_out)


def _tensors(args: tuple[Any, ...], positions: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of some arguments: each is one, a list of them, or a list of lists. The lists are not to be changed."""
    if len(positions) == 1:
        value = args[positions[0]]
        if type(value) is list:
            return value if not value or type(value[0]) is not list else list(chain.from_iterable(value))
        return [value] if isinstance(value, torch.Tensor) else []
    return list(chain.from_iterable(_tensors(args, (position,)) for position in positions))


def _first_tensor(args: tuple[Any, ...]) -> torch.Tensor | None:
    """Of a call without payload: a barrier's tensor says on which device it waits."""
    return next((value for value in args if isinstance(value, torch.Tensor)), None)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Observer:
    """Interns what it sees: ``identities`` and ``sizes`` are indexed by the numbers ``observe`` returns.

    ``root``: folder the user's lines are shown relative to.
    """

    def __init__(self, root: Path, on_outermost_without_grad: Any = lambda: None) -> None:
        self.groups = Groups()
        self.names = ModuleNames()
        self.tracker = ModuleTracker(self.names, on_outermost_without_grad)
        self.identities: list[Identity] = []
        self.sizes: dict[int, Sizes] = {}
        self.device_types: set[str] = set()
        self.graph_calls = 0
        """Collectives that were captured into a CUDA graph instead of being run. Their replays pass nothing here."""
        self._attribution = Attribution(self.tracker, self._modules_at)
        self._identity_ids: dict[tuple[Any, ...], int] = {}
        self._size_ids: dict[tuple[Any, ...], int] = {}
        self._size_numbers = itertools.count()
        self._lock = threading.Lock()
        self._root = str(root) + os.sep
        self._home = os.path.expanduser("~") + os.sep  # noqa: PTH111  Path.home raises where a user has no home

    def observe(self, op: Op, args: tuple[Any, ...]) -> tuple[int, int, str]:
        """(index into identities, index into sizes, phase) of the collective being issued on this thread."""
        tensors_in = _tensors(args, op.inputs)
        tensors_out = tensors_in if op.outputs == op.inputs else _tensors(args, op.outputs)
        frame = sys._getframe(2)
        for tensor in chain(tensors_in, tensors_out):
            if type(tensor) is not torch.Tensor:
                with without_torch_function():  # a subclass's own code must not run here
                    return self._observe(op, args, tensors_in, tensors_out, frame)
        return self._observe(op, args, tensors_in, tensors_out, frame)

    def _observe(
        self,
        op: Op,
        args: tuple[Any, ...],
        tensors_in: list[torch.Tensor],
        tensors_out: list[torch.Tensor],
        below: FrameType,
    ) -> tuple[int, int, str]:
        first = tensors_in[0] if tensors_in else tensors_out[0] if tensors_out else None
        dtype = first.dtype if first is not None else None
        phase, module, cause, frame = self._attribution.origin(below, op.kind)
        group = self._group(op, args)
        key = (op.name, group.key, phase, module, cause.key if cause is not None else "", dtype)
        index = self._identity_ids.get(key)
        if index is None:
            with self._lock:
                if first is not None:
                    self.device_types.add(first.device.type)
                index = self._learn(key, op, group, cause)
        identity = self.identities[index]
        placed = first if first is not None else _first_tensor(args)
        if placed is not None and torch_private.enters_graph(placed):
            with self._lock:
                self.graph_calls += 1
        if isinstance(frame, Place):
            if frame not in identity.seen:
                self._learn_line(identity, frame, *frame)
        elif frame is not None:
            place = (id(frame.f_code), frame.f_lasti)
            if place not in identity.seen:
                self._learn_line(identity, place, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        return index, self._size(op, tensors_in, tensors_out, dtype), phase

    def _modules_at(self, frame: FrameType) -> set[str]:
        """Modules whose forward issued a collective where this frame stands, by a look at every identity."""
        place = (id(frame.f_code), frame.f_lasti)
        return {known.module for known in list(self.identities) if known.phase == "forward" and place in known.seen}

    def _learn(self, key: tuple[Any, ...], op: Op, group: Group, cause: Cause | None) -> int:
        if key in self._identity_ids:
            return self._identity_ids[key]
        _, _, phase, module, _, dtype = key
        if len(self.identities) >= MAX_IDENTITIES:
            key = (op.name, group.key, phase, "", "", dtype)
            module, cause = "", None
            if key in self._identity_ids:
                return self._identity_ids[key]
        name = str(dtype).removeprefix("torch.") if dtype is not None else ""
        index = len(self.identities)
        self.identities.append(Identity(op, group, phase, module, cause, name))
        self._identity_ids[key] = index
        return index

    def sizes_full(self) -> bool:
        """Whether ``forget_sizes`` is due, at the next end of a step."""
        return len(self._size_ids) >= MAX_SIZES

    def forget_sizes(self) -> None:
        """Start the table of sizes anew. Numbers are never used again, and the newest generation stays readable:
        another thread may have handed one out a moment ago."""
        newest = set(self._size_ids.values())
        self._size_ids = {}
        self.sizes = {number: size for number, size in self.sizes.items() if number in newest}

    def _group(self, op: Op, args: tuple[Any, ...]) -> Group:
        if op.group < 0:
            return UNKNOWN
        value = args[op.group]
        if op.group_is_name:
            return self.groups.named(value)
        return self.groups.of(unbox_group(value))

    def _size(
        self, op: Op, tensors_in: list[torch.Tensor], tensors_out: list[torch.Tensor], dtype: torch.dtype | None
    ) -> int:
        shapes_in = tuple([tensor.shape for tensor in tensors_in])
        shapes_out = shapes_in if tensors_out is tensors_in else tuple([tensor.shape for tensor in tensors_out])
        key = (op.name, shapes_in, shapes_out, dtype)
        index = self._size_ids.get(key)
        if index is None:
            index = next(self._size_numbers)
            self.sizes[index] = Sizes(
                tuple(tuple(int(length) for length in shape) for shape in shapes_in),
                tuple(tuple(int(length) for length in shape) for shape in shapes_out),
                _bytes(tensors_in),
                _bytes(tensors_out),
            )
            self._size_ids[key] = index
        return index

    def _learn_line(self, identity: Identity, place: Hashable, file: str, number: int | None, function: str) -> None:
        if len(identity.seen) >= 10_000:  # a program that generates code for ever
            return
        identity.seen.add(place)
        if len(identity.lines) >= MAX_LINES:
            return
        line = Line(self.relative(file), number or 0, function)
        if line not in identity.lines:
            identity.lines.append(line)

    def relative(self, path: str) -> str:
        """A path below the program's root, a packages folder or the home, without these."""
        if path.startswith(self._root):
            return path[len(self._root) :]
        for marker in ("/site-packages/", "/dist-packages/"):
            if marker in path:
                return path.rpartition(marker)[2]
        if path.startswith(self._home):
            return path[len(self._home) :]
        return path
