"""Why a collective was issued: phase, module, redistribute and user line, read off the Python frames below it.

One walk from the collective outwards answers all four. It costs nothing when no collective runs, survives caught
exceptions and module reuse, and patches neither DTensor nor FSDP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from commwatch.agent.recorder import codes
from commwatch.agent.recorder.codes import DISPATCH, FSDP_GROUP, MODULE_CALL, REDISTRIBUTE, USER
from commwatch.agent.recorder.modules import ModuleTracker
from commwatch.agent.recorder.torch_private import current_autograd_node, node_sequence_number, sequence_number

MAX_FRAMES = 256
"""Frames looked at; a deeper stack leaves what was not found by then unknown."""

_PHASES = {codes.BACKWARD: "backward", codes.OPTIMIZER: "optimizer", codes.CLIP: "clip", codes.CHECKPOINT: "checkpoint"}


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
    parts = [str(placement) for placement in placements]
    return parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"


def _locals(frame: FrameType, *names: str) -> list[Any]:
    """Values of local variables, without leaving a snapshot behind that would keep the frame's tensors alive."""
    snapshot = frame.f_locals
    values = [snapshot.get(name) for name in names]
    if codes.CLEARABLE_LOCALS:
        snapshot.clear()
    return values


Origin = tuple[str, str, Cause | None, FrameType | None]
"""Phase, module, cause and the innermost user frame: use the frame at once, never keep it."""


class Attribution:
    """Answers for the collective that is being issued on this thread."""

    def __init__(self, tracker: ModuleTracker) -> None:
        self._tracker = tracker
        self._codes = codes.Codes()
        self._causes: dict[tuple[Any, ...], Cause] = {}

    def origin(self, frame: FrameType | None) -> Origin:
        """Walk outwards from ``frame``, a frame below the collective's Python caller."""
        meanings = self._codes.meanings
        user = module_frame = fsdp_frame = redistribute = None
        phase = ""
        dtensor = False
        node = current_autograd_node()
        for _ in range(MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            meaning = meanings.get(id(code))
            if meaning is None:
                meaning = self._codes.learn(code)
            if meaning:
                if meaning == USER:
                    if user is None:
                        user = frame
                        if phase:
                            break
                elif meaning == MODULE_CALL:
                    if not phase:
                        module_frame = frame
                        phase = "recompute" if node is not None else "forward"
                        if user is not None:
                            break
                elif meaning == REDISTRIBUTE:
                    dtensor = True
                    if redistribute is None:
                        redistribute = frame
                elif meaning == FSDP_GROUP:
                    if fsdp_frame is None:
                        fsdp_frame = frame
                elif meaning >= DISPATCH:
                    dtensor = True
                elif not phase:
                    phase = _PHASES[meaning]
                    if user is not None:
                        break
            frame = frame.f_back
        if not phase:
            phase = "backward" if node is not None else "forward" if dtensor else "other"
        module = self._module(phase, module_frame, fsdp_frame, node)
        cause = self._cause(redistribute) if redistribute is not None else None
        if phase == "forward" and module_frame is not None:
            # An explicit redistribute is an autograd function and made the newest node. An op may have made none.
            if cause is not None and not cause.implicit:
                self._tracker.intervals.tag(sequence_number() - 1, module)
            if self._without_grad():
                phase = "eval"
        return phase, module, cause, user

    def _module(self, phase: str, module_frame: FrameType | None, fsdp_frame: FrameType | None, node: Any) -> str:
        if fsdp_frame is not None:
            group, modules = _locals(fsdp_frame, "self", "modules")
            modules = getattr(group, "modules", modules)
            if modules:
                return self._name(modules[0])
        if module_frame is not None:
            stack = self._tracker.stack
            if stack.calls and not stack.after_child:
                return self._tracker.names.by_identity(stack.calls[-1])
            return self._name(_locals(module_frame, "self")[0])
        if phase == "backward" and node is not None:
            return self._tracker.intervals.module_of(node_sequence_number(node))
        return ""

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
        key = (current.placements, target.placements, implicit, asked)
        found = self._causes.get(key)
        if found is None:
            if len(self._causes) >= 10_000:
                self._causes.clear()
            found = self._causes[key] = Cause(
                placements_text(current.placements), placements_text(target.placements), implicit, str(asked)
            )
        return found
