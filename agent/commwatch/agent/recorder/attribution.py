"""Why a collective was issued: phase, module, redistribute and user line, read off the Python frames below it.

One walk from the collective outwards answers all four. It costs nothing when no collective runs, survives caught
exceptions and module reuse, and patches neither DTensor nor FSDP.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn

from commwatch.agent.recorder import codes, torch_private
from commwatch.agent.recorder.codes import (
    BACKWARD,
    COMPILED_NODE,
    DISPATCH,
    FSDP1,
    FSDP_GROUP,
    GRAPH,
    INDUCTOR,
    MODULE_CALL,
    NODE,
    PIPELINE,
    RECOMPUTE,
    REDISTRIBUTE,
    USER,
)
from commwatch.agent.recorder.modules import ROOT, ModuleTracker
from commwatch.agent.recorder.regions import Place, Placements, Regions, module_of
from commwatch.agent.recorder.torch_private import current_autograd_node, node_sequence_number, sequence_number

MAX_FRAMES = 256
"""Frames looked at; a deeper stack leaves what was not found by then unknown."""

_DTENSOR = frozenset({codes.REDISTRIBUTE, codes.DISPATCH, codes.DTENSOR})
MAX_NESTED = 8
"""Backwards inside backwards that are followed; deeper ones have no module."""

_PHASES = {
    codes.BACKWARD: "backward",
    codes.OPTIMIZER: "optimizer",
    codes.CLIP: "clip",
    codes.CHECKPOINT: "checkpoint",
    codes.RECOMPUTE: "recompute",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """A DTensor redistribute: placements before and after, whether op dispatch asked for it, and which op."""

    src: str
    dst: str
    implicit: bool
    op: str

    key: str = field(init=False, repr=False, compare=False)
    """What ``str`` shows, made once: a text's hash is kept, a dataclass's is computed at every look-up."""

    def __post_init__(self) -> None:
        asked = f" asked by {self.op}" if self.op else ""
        text = f"{'implicit' if self.implicit else 'explicit'} redistribute {self.src} -> {self.dst}{asked}"
        object.__setattr__(self, "key", text)

    def __str__(self) -> str:
        """Such as ``implicit redistribute S(0) -> R asked by aten.mm.default``."""
        return self.key


def placements_text(placements: Any) -> str:
    """``S(0)`` for one mesh dimension, ``[S(0), R]`` for more."""
    texts = [(placement, str(placement)) for placement in placements]
    # torch 2.9 leaves the operation out.
    parts = [f"P({placement.reduce_op})" if text == "P" else text for placement, text in texts]
    return parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"


def _locals(frame: FrameType, *names: str) -> list[Any]:
    """Values of local variables, without leaving a snapshot behind that would keep the frame's tensors alive."""
    snapshot = frame.f_locals
    values = [snapshot.get(name) for name in names]
    if codes.CLEARABLE_LOCALS:
        snapshot.clear()
    return values


def _contains(outer: str, inner: str) -> bool:
    return outer in {inner, ROOT} or inner.startswith(f"{outer}.")


Origin = tuple[str, str, Cause | None, FrameType | Place | None]
"""Phase, module, cause and the innermost user frame or line: use the frame at once, never keep it."""


class _Seen:
    """What one walk met first of each kind."""

    __slots__ = ("backward", "fsdp", "module", "node", "pipeline", "recompute", "redistribute", "region", "user")

    def __init__(self, node: Any) -> None:
        self.node = node
        self.user: FrameType | None = None
        self.module: FrameType | None = None
        self.fsdp: FrameType | None = None
        self.redistribute: FrameType | None = None
        self.backward: FrameType | None = None
        self.pipeline: FrameType | None = None
        self.region: FrameType | None = None
        self.recompute: FrameType | None = None


class Attribution:
    """Answers for the collective that is being issued on this thread."""

    def __init__(self, tracker: ModuleTracker, modules_at: Callable[[FrameType], Iterable[str]]) -> None:
        """``modules_at`` gives the modules that issued a collective in forward where a user's frame stands."""
        self._tracker = tracker
        self._modules_at = modules_at
        self._codes = codes.Codes()
        self._causes: dict[tuple[Any, ...], Cause] = {}
        self._regions = Regions()

    def origin(self, frame: FrameType | None, kind: str = "") -> Origin:
        """Walk outwards from ``frame``, a frame below the collective's Python caller. ``kind``: of the collective."""
        seen = _Seen(current_autograd_node())
        phase = self._walk(frame, seen)
        place: FrameType | Place | None = seen.user
        placements: Placements | None = None
        if seen.pipeline is not None and phase == "other":
            phase, module = self._of_pipeline(seen.pipeline, kind)
        elif seen.region is not None:
            phase, module, line, placements = self._of_region(phase, seen)
            place = line or place
        else:
            module = self._module(phase, seen)
        cause = None
        if seen.redistribute is not None:
            cause = self._cause(seen.redistribute)
        elif placements is not None:
            cause = self._interned(*placements, implicit=False, asked="")
        if phase == "forward" and seen.module is not None:
            # An explicit redistribute is an autograd function and made the newest node. An op may have made none.
            if seen.redistribute is not None and cause is not None and not cause.implicit:
                self._tracker.intervals.tag(sequence_number() - 1, module)
            if self._without_grad():
                phase = "eval"
        return phase, module, cause, place

    def _walk(self, frame: FrameType | None, seen: _Seen) -> str:
        """Fill ``seen`` and return the phase. Ends as soon as both phase and user frame are known."""
        meanings = self._codes.meanings
        phase = ""
        dtensor = False
        for _ in range(MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            meaning = meanings.get(id(code))
            if meaning is None:
                meaning = self._codes.learn(code)
            if meaning:
                if meaning == USER:
                    if seen.user is None:
                        seen.user = frame
                        if phase:
                            break
                elif meaning == MODULE_CALL:
                    if not phase and not (seen.region is not None and self._is_graph(frame)):
                        seen.module = frame
                        phase = "recompute" if seen.node is not None else "forward"
                        if seen.user is not None:
                            break
                elif meaning in _PHASES:
                    if not phase:
                        phase = _PHASES[meaning]
                        if meaning == BACKWARD:
                            seen.backward = frame
                        elif meaning == RECOMPUTE:
                            seen.recompute = frame
                        if seen.user is not None:
                            break
                else:
                    dtensor |= meaning in _DTENSOR
                    self._note(meaning, frame, seen)
            frame = frame.f_back
        if not phase:
            phase = "backward" if seen.node is not None else "forward" if dtensor else "other"
        return phase

    def _note(self, meaning: int, frame: FrameType, seen: _Seen) -> None:
        if meaning == REDISTRIBUTE:
            seen.redistribute = seen.redistribute or frame
        elif meaning in {FSDP_GROUP, FSDP1}:
            if seen.fsdp is None and self._sharded(frame) is not None:
                seen.fsdp = frame
        elif meaning in {GRAPH, INDUCTOR}:
            if seen.region is None and seen.module is None:
                seen.region = frame
        elif meaning == PIPELINE:
            seen.pipeline = seen.pipeline or frame

    def _is_graph(self, frame: FrameType) -> bool:
        """Whether this call of a module is that of a compiled region's own graph, which is no module of the program."""
        module = _locals(frame, "self")[0]
        return torch_private.is_graph_module(module) and self._tracker.names.known(module) is None

    def _module(self, phase: str, seen: _Seen) -> str:
        if seen.fsdp is not None:
            return self._name(self._sharded(seen.fsdp))
        if seen.module is not None:
            stack = self._tracker.stack
            if stack.calls and not stack.after_child:
                return self._tracker.names.by_identity(stack.calls[-1])
            return self._name(_locals(seen.module, "self")[0])
        if seen.node is None:
            return ""
        if phase == "backward":
            return self._of_node(seen)
        if seen.recompute is not None and phase == "recompute":
            return self._of_recomputed(seen, seen.recompute)
        return ""

    def _of_recomputed(self, seen: _Seen, frame: FrameType) -> str:
        """The module that called checkpoint on a part of its own forward: no module call stands below that part.

        With reentrance its node runs. Without, the node is one of the part's: the module is the one whose method is
        recomputed, or else among those that contain the node's and issued a collective from this line in forward.
        """
        module = self._of_node(seen)
        if frame.f_code.co_name == "backward":
            return module
        owner = getattr(_locals(frame, "fn")[0], "__self__", None)
        if isinstance(owner, nn.Module):
            return self._name(owner)
        if seen.user is None or not module:
            return ""
        around = {found for found in self._modules_at(seen.user) if _contains(found, module)}
        return around.pop() if len(around) == 1 else ""

    def _of_node(self, seen: _Seen) -> str:
        """The module whose forward made the node that runs; the parameter's when it accumulates a gradient."""
        parameter = torch_private.accumulated(seen.node)
        if parameter is not None:
            return self._tracker.names.of_parameter(parameter)
        return self._of_number(node_sequence_number(seen.node), seen.backward)

    def _of_number(self, number: int, backward: FrameType | None) -> str:
        """The module whose forward, or recomputation, made the node with this number, which runs in this backward."""
        intervals = self._tracker.intervals
        for _ in range(MAX_NESTED):
            enclosing = self._enclosing(backward, patient=intervals.recomputed())
            if enclosing is None:
                return intervals.module_of(number)
            module = intervals.module_of(number, nested=True)
            if module:
                return module
            # Made by a part that was recomputed outside of any module call: it belongs to the node that recomputed it.
            node, context = _locals(enclosing, "self", "ctx")
            node = context if context is not None else node
            if not hasattr(node, "_sequence_nr"):
                return ""
            number, backward = node_sequence_number(node), self._backward_below(enclosing)
        return ""

    def _enclosing(self, frame: FrameType | None, *, patient: bool) -> FrameType | None:
        """The frame of the node inside which the backward of ``frame`` runs, as checkpointing's does; None for none.

        A user's own frames hide such a node unless ``patient``, but for the one that is called by it.
        """
        of = self._codes.of
        for _ in range(MAX_FRAMES):
            frame = frame.f_back if frame is not None else None
            if frame is None:
                return None
            meaning = of(frame.f_code)
            if meaning in {NODE, RECOMPUTE}:
                return frame
            if meaning == USER and not patient:
                frame = frame.f_back
                return frame if frame is not None and of(frame.f_code) == NODE else None
        return None

    def _backward_below(self, frame: FrameType | None) -> FrameType | None:
        for _ in range(MAX_FRAMES):
            frame = frame.f_back if frame is not None else None
            if frame is None or self._codes.of(frame.f_code) == BACKWARD:
                return frame
        return None

    @staticmethod
    def _sharded(frame: FrameType) -> Any:
        """The module whose parameters FSDP gathers or reduces in this frame; None when the frame does not say."""
        group, modules, handle = _locals(frame, "self", "modules", "handle")
        modules = getattr(group, "modules", modules)
        if modules:
            return modules[0]
        return getattr(handle, "_fully_sharded_module", None) or getattr(group, "_fully_sharded_module", None)

    def _of_pipeline(self, frame: FrameType, kind: str) -> tuple[str, str]:
        """A schedule passes activations forward and their gradients backward, for the stage's module."""
        direction = ""
        stage = None
        (description,) = _locals(frame, "desc")
        words = str(description or "").split("_")
        for way, act in itertools.pairwise(words):
            if act == kind:
                direction = way
        caller = frame.f_back
        for _ in range(3):
            if caller is None or stage is not None:
                break
            schedule, stage, act = _locals(caller, "self", "stage", "comp_type")
            stage = stage or getattr(schedule, "_stage", None)
            direction = direction or {"F": "fwd", "B": "bwd"}.get(str(act).rpartition("_")[2], "")
            caller = caller.f_back
        phase = {"fwd": "forward", "bwd": "backward"}.get(direction, "other")
        module = getattr(stage, "submod", None)
        return phase, self._name(module) if module is not None and phase != "other" else ""

    def _of_region(self, phase: str, seen: _Seen) -> tuple[str, str, Place | None, Placements | None]:
        """Phase, module, line and explicit redistribute of a collective inside a compiled region."""
        frame = seen.region
        assert frame is not None
        meaning = self._codes.meanings[id(frame.f_code)]
        if phase == "backward":
            nodes, place = self._regions.node(frame, meaning, None)
            module = module_of(nodes, self._of_node(seen)) if seen.node is not None else ""
            return phase, module, place, None
        caller, differentiated = self._compiled_caller(frame)
        region = self._regions.of_caller(caller) if caller is not None else None
        nodes, place = self._regions.node(frame, meaning, region)
        if region is None or caller is None:
            return phase, "", place, None
        root = caller.f_globals.get(region.variable) if region.scope == "G" else _locals(caller, region.variable)[0]
        base = self._name(root) if isinstance(root, nn.Module) else ""
        if differentiated and base:
            self._tracker.intervals.tag(sequence_number() - 1, base)
        around = self._name(_locals(seen.module, "self")[0]) if seen.module is not None else ""
        module = module_of(nodes, base, around)
        phase = "forward" if phase == "other" and module else phase
        return phase, module, place, self._regions.redistribute(nodes)

    def _compiled_caller(self, frame: FrameType) -> tuple[FrameType | None, bool]:
        """The frame of the function whose code dynamo replaced, and whether an autograd node stands for the region."""
        caller: FrameType | None = frame
        differentiated = False
        for _ in range(MAX_FRAMES):
            caller = caller.f_back if caller is not None else None
            if caller is None:
                break
            differentiated |= self._codes.of(caller.f_code) == COMPILED_NODE
            if any(name.startswith(torch_private.COMPILED_NAME) for name in caller.f_code.co_names):
                break
        return caller, differentiated

    def _name(self, module: Any) -> str:
        names = self._tracker.names
        known = names.known(module)
        if known is not None:
            return known
        stack = self._tracker.stack
        outermost = stack.outermost() if stack.calls and stack.outermost is not None else None
        parent = names.by_identity(stack.calls[-1]) if stack.calls else ""
        return names.name(module, outermost if outermost is not None else module, parent)

    def _without_grad(self) -> bool:
        stack = self._tracker.stack
        return bool(stack.calls) and not stack.grad

    def _cause(self, frame: FrameType) -> Cause:
        current, target = _locals(frame, "current_spec", "target_spec")
        asked: Any = ""
        caller = frame.f_back
        implicit = False
        if caller is not None and self._codes.meanings.get(id(caller.f_code)) == DISPATCH:
            implicit = True
            info, suggested = _locals(caller, "op_info", "suggested_input_schema")
            schema = getattr(info, "schema", None) or suggested
            asked = getattr(schema, "op", "")
        return self._interned(current.placements, target.placements, implicit=implicit, asked=asked)

    def _interned(self, src: Any, dst: Any, *, implicit: bool, asked: Any) -> Cause:
        key = (src, dst, implicit, asked)
        found = self._causes.get(key)
        if found is None:
            if len(self._causes) >= 10_000:
                self._causes.clear()
            found = self._causes[key] = Cause(placements_text(src), placements_text(dst), implicit, str(asked))
        return found
