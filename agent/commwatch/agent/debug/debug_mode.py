"""The drop-in for ``torch.utils._debug_mode.DebugMode``: the same text for a fraction of the time."""

from __future__ import annotations

from typing import Any

from commwatch.agent.debug import torch_private as private
from commwatch.agent.debug.op_recorder import OpRecorder


class DebugModeError(RuntimeError):
    """Op-level recording cannot work with this torch; the message says what is missing."""


class DebugMode(OpRecorder):
    """Records ops as a tree and shows them as torch's ``DebugMode`` does.

    Flags, methods, attributes and text are those of torch 2.13, of which this is a subclass. Beyond them:
    ``max_records`` bounds memory (``dropped_records`` counts the rest), ``debug_string(complete=True)`` shows the
    process groups and meshes that torch leaves out, and stacks are recorded without anomaly mode and become text when
    somebody reads them. Storages are shown by their size, and neither reads of the mode's own nor ops of a module
    tracker are recorded, as torch's mode does where it records functions or modules.
    Raises DebugModeError when this torch lacks what it needs.
    """

    def __init__(self, **flags: Any) -> None:
        missing = private.missing()
        if missing:
            raise DebugModeError(f"cannot record ops: this torch lacks {', '.join(missing)}")
        private.prepare_annotations()
        super().__init__(**flags)

    def debug_string(self, show_stack_trace: bool | None = None, *, complete: bool = False) -> str:
        """The tree as text: two spaces for each level.

        ``show_stack_trace``: put the user's line above each group of ops; by default as ``record_stack_trace``.
        ``complete``: process groups as ``tp(size 2, stride 1)`` and DTensors with their mesh as ``on DM(4, 2)``.
        """
        if not complete:
            text: str = super().debug_string(show_stack_trace)
            return text
        with private.no_functions():
            lines = [f"  {'  ' * call.call_depth}{_render(call)}" for call in self.operators]
        if self.dropped_records:
            lines.append(f"  ({self.dropped_records} further records were not kept: max_records={self.max_records})")
        return "\n".join(lines)


def _render(call: Any) -> str:
    """Records that torch itself put there know nothing more than their text."""
    text: str = call.render_complete() if hasattr(call, "render_complete") else call.render([])
    return text
