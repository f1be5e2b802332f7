"""Lines of the user's program, numbered."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType

from commwatch.agent.recorder.codes import BACKWARD, NODE, RECOMPUTE, USER, Codes
from commwatch.agent.recorder.observer import Line

_NODES = frozenset({NODE, RECOMPUTE})
MAX_LINES = 10_000
MAX_FRAMES = 128
"""Frames looked at for one record; a deeper stack leaves its line unknown."""


class Places:
    """``lines`` in order of first appearance. ``relative`` shortens a path to the program's root."""

    def __init__(self, relative: Callable[[str], str]) -> None:
        self.lines: list[Line] = []
        self._relative = relative
        self._codes = Codes()
        self._numbers: dict[tuple[int, int], int] = {}

    def of(self, frame: FrameType | None) -> int:
        """1 + index into ``lines`` of the innermost user line at or below ``frame``; 0 when there is none."""
        meanings = self._codes.meanings
        for _ in range(MAX_FRAMES):
            if frame is None:
                return 0
            code = frame.f_code
            meaning = meanings.get(id(code))
            if meaning is None:
                meaning = self._codes.learn(code)
            if meaning == USER:
                return self._number(code, frame.f_lineno)
            frame = frame.f_back
        return 0

    def in_nested_backward(self, frame: FrameType | None) -> bool:
        """Whether ``frame`` stands in a backward that an autograd node of another backward runs."""
        backward = False
        for _ in range(2 * MAX_FRAMES):
            if frame is None:
                return False
            meaning = self._codes.of(frame.f_code)
            if backward and meaning in _NODES:
                return True
            backward |= meaning == BACKWARD
            frame = frame.f_back
        return False

    def _number(self, code: CodeType, line: int) -> int:
        key = (id(code), line)
        found = self._numbers.get(key)
        if found is None:
            if len(self.lines) >= MAX_LINES:
                return 0
            self.lines.append(Line(self._relative(code.co_filename), line or 0, code.co_name))
            found = self._numbers[key] = len(self.lines)
        return found
