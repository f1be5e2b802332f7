"""The op recorder of a capture: it also knows lines, collectives and, in backward, modules."""

from __future__ import annotations

import sys
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, NamedTuple

from commwatch.agent.capture.hashes import Hashes
from commwatch.agent.capture.places import Places
from commwatch.agent.debug import torch_private as private
from commwatch.agent.debug.calls import AnnotateCall, OpCall, OutputPlacementCall
from commwatch.agent.debug.group_arguments import GroupArguments
from commwatch.agent.debug.op_recorder import OpRecorder
from commwatch.agent.debug.stacks import ForwardNotes
from commwatch.agent.recorder import torch_private
from commwatch.agent.recorder.catalog import Op
from commwatch.agent.recorder.observer import Observer

_HASHED = frozenset({"op", "async_op"})
MAX_DISPATCH_FRAMES = 64
"""Frames between an op on DTensors and what runs for it."""

MAX_RECORDS = 200_000
"""Records kept of one step; later ones are counted as dropped."""


class _Desugared(NamedTuple):
    """An op on DTensors whose op on local tensors is still to come: some have none.

    ``frame`` is the identity of the frame that issued it, which is not kept; 0 where the autograd engine did.
    """

    op: Any
    depth: int
    frame: int
    instruction: int

    def runs(self, frame: FrameType | None) -> bool:
        """Whether the instruction that issued it still runs, called from ``frame``."""
        if not self.frame:
            return True
        for _ in range(MAX_DISPATCH_FRAMES):
            if frame is None:
                return False
            if id(frame) == self.frame:
                return frame.f_lasti == self.instruction
            frame = frame.f_back
        return False


class OpCapture(OpRecorder):
    """Records one step. ``places`` are the lines the records' ``place`` counts in, from 1.

    Where torch's text shows a DTensor op beside its module, here it is a child of it, and what runs until the op on
    local tensors that it comes down to is a child of the DTensor op. ``collectives`` holds, by index of a record, the
    calls it issued: (identity in the observer, position in the step). ``hashes`` is a kind of ``hashes.KINDS``, or
    empty for none.
    """

    def __init__(self, observer: Observer, *, hashes: str = "", max_records: int = MAX_RECORDS) -> None:
        super().__init__(max_records=max_records, groups=GroupArguments(observer.groups))
        self._hashes = Hashes(hashes) if hashes else None
        if self._hashes is not None:
            self._after = self._hash
        self.places = Places(observer.relative)
        self.collectives: dict[int, list[tuple[int, int]]] = {}
        self.spent_ns = 0
        """Time its records took, without the dispatcher's way to them and back."""
        self._observer = observer
        self._notes: ForwardNotes[int] = ForwardNotes()
        self._open_modules: list[bool] = []
        self._nested: dict[int, bool] = {}
        self._backward: tuple[str, int] | None = None
        self._desugared: _Desugared | None = None
        self._issuing: tuple[int, int] | None = None

    # What the recorder tells

    def entered(self, name: str) -> None:
        """A module's forward begins."""
        self._guarded(self._entered, name)

    def _entered(self, name: str) -> None:
        if private.is_active(self):
            self._desugared = None
            self._module(name, "nn.Mod")
            self._open_modules.append(torch_private.current_autograd_node() is not None)

    def left(self) -> None:
        """The newest module call ended."""
        self._guarded(self._left)

    def _left(self) -> None:
        if self._open_modules and private.is_active(self):
            self._open_modules.pop()
            self._close_innermost_backward()
            self._module_left()

    @property
    def _recomputing(self) -> bool:
        """Whether a module's forward runs for backward, as in activation checkpointing."""
        return bool(self._open_modules) and self._open_modules[-1]

    def saw(self, op: Op, identity: int, position: int) -> None:
        """The recorder saw a collective: of the op that runs now, or of one that does not pass this mode."""
        self._guarded(self._attach, op, identity, position)

    def _attach(self, op: Op, identity: int, position: int) -> None:
        if self._issuing != (len(self.operators), get_ident()) or self.operators[-1].has_output:
            before = len(self.operators)
            self._keep(OpCall(op.name, "op", (), None, self.call_depth + 1))
            if len(self.operators) == before:
                return
        self.collectives.setdefault(len(self.operators) - 1, []).append((identity, position))

    # Records

    def _op(self, facts: Any, kind: str, args: tuple[Any, ...], kwargs: Any, depth: int) -> OpCall | None:
        began = perf_counter_ns()
        node = torch_private.current_autograd_node()
        before = self.call_depth
        self._follow_backward(node)
        depth += self.call_depth - before
        if kind == "dtensor_op":
            self._desugared = None
            depth += 1  # a child of its module, like every other op
        else:
            depth += self._in_dtensor_op()
        call = super()._op(facts, kind, args, kwargs, depth)
        if kind == "dtensor_op":
            issuer = sys._getframe(2).f_back
            frame, instruction = (id(issuer), issuer.f_lasti) if issuer is not None else (0, 0)
            self._desugared = _Desugared(facts.op, self.call_depth, frame, instruction)
        elif self._desugared is not None and self._desugared[:2] == (facts.op, self.call_depth):
            self._desugared = None
        if call is not None:
            call.place = self._place(node)
            if facts.group:
                self._issuing = (len(self.operators), get_ident())
        self.spent_ns += perf_counter_ns() - began
        return call

    def _hash(self, call: OpCall, args: tuple[Any, ...], result: Any) -> None:
        if self._hashes is not None and call.kind in _HASHED:
            began = perf_counter_ns()
            with private.no_functions():
                found = self._hashes.of(call.name, args, result)
            if found is not None:
                call.log = {"hash": found}
            self.spent_ns += perf_counter_ns() - began

    def _redistribute(self, *arguments: Any, **options: Any) -> None:
        self._follow_backward(torch_private.current_autograd_node())
        super()._redistribute(*arguments, **options)

    def _range(self, func: Any, args: tuple[Any, ...]) -> None:
        if func is private.EXIT_RANGE:
            self._close_innermost_backward()
        super()._range(func, args)

    def _keep(self, call: Any) -> None:
        call.place = self.places.of(sys._getframe(1))
        if isinstance(call, AnnotateCall) and call.kind != "module":
            call.call_depth += 1  # a child of its module, like every op
        if self._in_dtensor_op():
            call.call_depth += 1
        elif isinstance(call, OutputPlacementCall) and self.operators:
            call.call_depth = max(call.call_depth, self.operators[-1].call_depth)  # behind the local op
        super()._keep(call)

    def _in_dtensor_op(self) -> int:
        """1 between a DTensor op and the op on local tensors that it comes down to, else 0."""
        desugared = self._desugared
        if desugared is None:
            return 0
        if self.call_depth < desugared.depth or not desugared.runs(sys._getframe(2)):
            self._desugared = None
            return 0
        return 1

    def _place(self, node: Any) -> int:
        """In forward the line that runs; in backward that of the forward op behind it, where it is known."""
        here = self.places.of(sys._getframe(2))
        if node is None or self._recomputing:
            self._notes.note(here)
            return here
        return self._notes.current() or here

    def _follow_backward(self, node: Any) -> None:
        """Keep the entry open of the module whose backward runs: it changes while nothing else is open in it."""
        if (self._backward is None and node is None) or self._recomputing:
            return
        module = self._module_of(node)
        if self._backward is not None:
            name, base = self._backward
            if module == name or self.call_depth != base + 1:
                return
            self._close_innermost_backward()
        if module:
            self._backward = (module, self.call_depth)
            self._keep(AnnotateCall(module, "nn.Mod backward", "module", self.call_depth + 1))
            self.call_depth += 1

    def _close_innermost_backward(self) -> None:
        """The entry ends, if nothing is open in it. What it was opened in may end no earlier."""
        if self._backward is not None and self.call_depth == self._backward[1] + 1:
            self.call_depth -= 1
            self._backward = self._desugared = None

    def _module_of(self, node: Any) -> str:
        if node is None:
            return ""
        names, intervals = self._observer.names, self._observer.tracker.intervals
        parameter = torch_private.accumulated(node)
        if parameter is not None:
            return names.of_parameter(parameter)
        return intervals.module_of(torch_private.node_sequence_number(node), nested=self._in_nested_backward())

    def _in_nested_backward(self) -> bool:
        """Whether this backward runs inside a node of another, on a graph that was recomputed there."""
        if not self._observer.tracker.intervals.recomputed():
            return False
        number = private.backward_number()
        nested = self._nested.get(number)
        if nested is None:
            nested = self._nested[number] = self.places.in_nested_backward(sys._getframe(1))
        return nested
