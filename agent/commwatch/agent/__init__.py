"""The agent: what runs inside the ranks of a job.

``record`` is a context manager that needs no service; ``step`` marks the end of a step by hand. Both are imported
on first use, so that ``import torch`` with recording off costs nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commwatch.agent.recorder.local import record
    from commwatch.agent.session import step

__all__ = ["record", "step"]

_HOMES = {"record": "commwatch.agent.recorder.local", "step": "commwatch.agent.session"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
