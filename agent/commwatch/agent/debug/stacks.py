"""Python stacks that are symbolised when somebody reads them, and the forward stack behind an autograd node."""

from __future__ import annotations

import os
import traceback
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.utils._traceback import CapturedTraceback

from commwatch.agent.recorder.torch_private import current_autograd_node, node_sequence_number, sequence_number

_Note = TypeVar("_Note")

MAX_NODES = 200_000
"""Autograd nodes whose forward op is remembered; beyond it the older half is forgotten."""

_HERE = str(Path(__file__).parent) + os.sep


class LazyStack:
    """The Python stack as it stood, innermost frame last. Holds code objects and line numbers, no frames."""

    __slots__ = ("_captured", "_text")

    def __init__(self) -> None:
        self._captured: Any = CapturedTraceback.extract()
        self._text: str | None = None

    def text(self) -> str:
        """As ``traceback.format_stack`` shows it, without frames of the mode and the compiler."""
        if self._text is None:
            from torch.fx.experimental.symbolic_shapes import uninteresting_files

            hidden = uninteresting_files()
            frames = [
                frame
                for frame in self._captured.summary()
                if frame.filename not in hidden and not frame.filename.startswith(_HERE)
            ]
            self._text = "".join(traceback.StackSummary.from_list(frames).format())
            self._captured = None
        return self._text


class ForwardNotes(Generic[_Note]):
    """Something about the forward op that made an autograd node: noted by sequence number, without anomaly mode."""

    def __init__(self) -> None:
        self._by_number: dict[int, _Note] = {}
        self._leaves: dict[int, tuple[weakref.ref[Any], _Note]] = {}
        self._next = 0

    def note(self, note: _Note, leaves: Iterable[Any] = ()) -> None:
        """An op runs in forward: the nodes made since the op before it are its own, and those of ``leaves`` too."""
        number = sequence_number()
        if number - self._next > 64 or number < self._next:
            self._next = max(0, number - 1)
        for made in range(self._next, number):
            self._by_number[made] = note
        self._next = number
        for leaf in leaves:
            if id(leaf) not in self._leaves:
                self._leaves[id(leaf)] = (weakref.ref(leaf), note)
        _halve(self._by_number)
        _halve(self._leaves)

    def current(self) -> _Note | None:
        """What was noted for the node that the autograd engine runs now; None in forward, or when it is not known."""
        node = current_autograd_node()
        if node is None:
            return None
        variable = getattr(node, "variable", None)
        if variable is not None:
            found = self._leaves.get(id(variable))
            return found[1] if found is not None and found[0]() is variable else None
        return self._by_number.get(node_sequence_number(node))


def _halve(table: dict[int, Any]) -> None:
    if len(table) > MAX_NODES:
        for key in list(table)[: MAX_NODES // 2]:
            del table[key]
