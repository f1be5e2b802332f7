"""Reads off the Python frames below an op which module runs it, and whether it is computed again for backward.

Frames are right where hooks are not: after an exception caught in forward, in a module called twice, on any thread.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

MAX_FRAMES = 2_000
"""Frames looked at; below a deeper stack an op belongs to no module."""

_OTHER, _MODULE_CALL, _BACKWARD, _CHECKPOINT, _FSDP_GROUP, _COMPILER, _TRACER = range(7)

_TORCH = str(Path(torch.__file__).parent) + os.sep
_FUNCTIONS = {
    ("nn/modules/module.py", "_call_impl"): _MODULE_CALL,
    ("autograd/graph.py", "_engine_run_backward"): _BACKWARD,
}
_FILES = {
    "utils/checkpoint.py": _CHECKPOINT,
    "distributed/fsdp/_fully_shard/_fsdp_param_group.py": _FSDP_GROUP,
    "fx/experimental/proxy_tensor.py": _TRACER,
}
_COMPILERS = ("_functorch/", "_dynamo/", "_inductor/")
_AROUND_A_CALL = ("nn/modules/module.py", "fx/")
_CALLERS_OF_A_GRAPH = 8
_CALLERS_OF_AN_ENGINE = 4
_CLEARABLE_LOCALS = sys.version_info < (3, 13)  # f_locals is a copy there, which would keep the frame's tensors alive


def _inside(code: CodeType) -> str:
    path = code.co_filename
    return path[len(_TORCH) :].replace(os.sep, "/") if path.startswith(_TORCH) else ""


class _Meanings:
    """What each code object means, by identity; the objects are held, so that an identity is never used again."""

    LIMIT = 100_000

    def __init__(self) -> None:
        self._known: dict[int, tuple[CodeType, int]] = {}

    def of(self, code: CodeType) -> int:
        found = self._known.get(id(code))
        if found is not None:
            return found[1]
        inside = _inside(code)
        meaning = _FUNCTIONS.get((inside, code.co_name)) or _FILES.get(inside, _OTHER)
        if not meaning and inside.startswith(_COMPILERS):
            meaning = _COMPILER
        if len(self._known) >= self.LIMIT:
            self._known.clear()
        self._known[id(code)] = (code, meaning)
        return meaning


_meaning_of = _Meanings().of


def local(frame: FrameType, name: str) -> Any:
    """Value of a local variable; None when the frame has none of this name."""
    values = frame.f_locals
    value = values.get(name)
    if _CLEARABLE_LOCALS:
        values.clear()
    return value


@dataclass(frozen=True, slots=True)
class Place:
    """Where an op runs. ``module`` is held: use it at once.

    ``call`` is the frame of the module's call, None when FSDP named the module. ``again`` says that a forward runs once
    more under the autograd engine, ``nested`` that the engine runs what such a forward made. ``function`` identifies
    what checkpointing runs, or runs again, inside the module; 0 for none.
    """

    module: nn.Module | None = None
    call: FrameType | None = None
    again: bool = False
    nested: bool = False
    function: int = 0


def calls(frame: FrameType | None) -> list[FrameType]:
    """Frames of module calls from ``frame`` outwards."""
    found = []
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        if _meaning_of(frame.f_code) == _MODULE_CALL:
            found.append(frame)
        frame = frame.f_back
    return found


def traced(frame: FrameType | None) -> bool:
    """Whether the op runs while a graph is traced."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            return False
        if _meaning_of(frame.f_code) == _TRACER:
            return True
        frame = frame.f_back
    return False


def place(frame: FrameType | None, in_backward: bool, outside: set[int]) -> Place:
    """Walk outwards from ``frame``, below an op, to the innermost module call.

    ``outside`` holds identities of calls that do not count. In backward the walk ends at the engine: what called it is
    no part of the op.
    """
    module: nn.Module | None = None
    again = False
    function = 0
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        meaning = _meaning_of(frame.f_code)
        if meaning == _MODULE_CALL:
            if id(frame) in outside:
                break
            called = local(frame, "self")
            if not _compiled_graph(called, frame):
                again = in_backward
                return Place(called, frame, again, False, function) if module is None else Place(module, None, again)
        elif meaning == _FSDP_GROUP:
            if module is None:
                module = _first_of_group(frame)
        elif meaning == _CHECKPOINT:
            again = in_backward
            function = function or _checkpointed(frame)
        elif meaning == _BACKWARD and in_backward:
            return Place(module, None, again, not again and _called_by_checkpoint(frame), function)
        frame = frame.f_back
    return Place(module, None, again, False, function)


def _checkpointed(frame: FrameType) -> int:
    name = {"checkpoint": "function", "recompute_fn": "fn"}.get(frame.f_code.co_name)
    function = local(frame, name) if name else None
    return 0 if function is None else id(function)


def _first_of_group(frame: FrameType) -> nn.Module | None:
    modules = getattr(local(frame, "self"), "modules", None) or local(frame, "modules")
    return modules[0] if modules else None


def _called_by_checkpoint(frame: FrameType) -> bool:
    caller = frame.f_back
    for _ in range(_CALLERS_OF_AN_ENGINE):
        if caller is None:
            return False
        if _meaning_of(caller.f_code) == _CHECKPOINT:
            return True
        caller = caller.f_back
    return False


def _compiled_graph(module: object, frame: FrameType) -> bool:
    """Whether this call runs a graph the compiler made, which is no module of the program."""
    graphs = sys.modules.get("torch.fx")
    if graphs is None or not isinstance(module, graphs.GraphModule):
        return False
    caller = frame.f_back
    for _ in range(_CALLERS_OF_A_GRAPH):
        if caller is None or not _inside(caller.f_code).startswith(_AROUND_A_CALL):
            break
        caller = caller.f_back
    return caller is not None and _meaning_of(caller.f_code) == _COMPILER


def call_of(frame: FrameType | None) -> FrameType | None:
    """Frame of the module call whose hook ``frame`` is; None when a hook is run by somebody else."""
    for _ in range(4):
        if frame is None or _meaning_of(frame.f_code) == _MODULE_CALL:
            return frame
        frame = frame.f_back
    return None
