"""What runs op by op: the drop-in ``DebugMode`` and ``CommDebugMode``, and the recorder that captures steps with.

Imported on first use: neither the compiler nor DTensor is loaded for a job that is only watched.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commwatch.agent.debug.comm_debug_mode import CommDebugMode
    from commwatch.agent.debug.debug_mode import DebugMode
    from commwatch.agent.debug.op_recorder import OpRecorder

__all__ = ["CommDebugMode", "DebugMode", "OpRecorder"]

_HOMES = {
    "CommDebugMode": "commwatch.agent.debug.comm_debug_mode",
    "DebugMode": "commwatch.agent.debug.debug_mode",
    "OpRecorder": "commwatch.agent.debug.op_recorder",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
