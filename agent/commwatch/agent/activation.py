"""Waits for the first process group and starts recording there.

Until then the only trace in the process is one wrapped function: a program that never creates a group sees neither
hook nor log line, whatever variables a cluster sets everywhere.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("commwatch")
_started = False
_wrappers: list[Callable[..., Any]] = []


def arm() -> None:
    """Wrap what every door to a new process group reaches. Idempotent; does nothing without torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    from commwatch.agent.recorder import torch_private

    original = torch_private.group_creation()
    if original is None:
        _log.warning("commwatch: not recording: this torch creates process groups in an unknown way")
    elif original not in _wrappers:
        wrapper = _wrapped(original)
        _wrappers.append(wrapper)
        torch_private.replace_group_creation(wrapper)


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        created = original(*args, **kwargs)
        if not _started:
            _start(created)
        return created

    return new_process_group


def _start(created: tuple[Any, Any]) -> None:
    global _started
    _started = True
    try:
        from commwatch.agent import session

        group, store = created
        session.start(world_size=group.size(), rank=group.rank(), store=store, environ=os.environ)
    except Exception as error:  # noqa: BLE001  the job's process group stands: nothing of the agent may take it away
        _log.warning("commwatch: not recording: %s: %s", type(error).__name__, error)


def _in_child() -> None:
    """A forked child has no process group of its own yet: it may start anew when it creates one."""
    global _started
    _started = False


os.register_at_fork(after_in_child=_in_child)
