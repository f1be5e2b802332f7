"""Puts a Python kernel in front of every collective, and takes it away again.

The kernel is registered for the key ``BackendSelect``: the last one before the backends' own, on every device, in every
mode, and unused by these ops. So nothing of torch is replaced, and only collectives pass here.

It hands over by ``redispatch_boxed``, which releases the GIL while the backend's kernel runs, as torch's own bindings
do. A kernel that held it would deadlock with backend threads that need the GIL while they hold the backend's lock.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from commwatch.agent.recorder import catalog, torch_private
from commwatch.agent.recorder.codes import raised_by_signal

Sink = Callable[[catalog.Op, tuple[Any, ...]], None]
"""Called with the op and its arguments before the collective runs. Must not keep the arguments.

Handles its own errors: one that raises is shown nothing more, and nobody says so. Only what a signal handler of the
program raised goes through.
"""


class _Shown:
    """Who is shown collectives: replaced as a whole, so that a kernel of another thread never sees it change."""

    sinks: tuple[Sink, ...] = ()


_libraries: list[Any] = []
_lock = threading.Lock()


def _kernel(name: str, op: catalog.Op) -> Callable[..., Any]:
    redispatch = torch_private.redispatcher(name)
    behind = torch_private.KEYS_BEHIND
    meta = torch_private.META
    shown = _Shown

    @torch_private.uncompiled
    def recorded(keyset: Any, *args: Any) -> Any:
        keys = keyset & behind
        if not keys.has(meta):  # tracing and fake tensors communicate nothing
            for sink in shown.sinks:
                try:
                    sink(op, args)
                except Exception as error:  # noqa: PERF203  a sink may fail, neither the collective nor the next sink
                    if raised_by_signal(error):
                        raise
                    silence(sink)
        return redispatch(keys, *args)

    return recorded


def _install() -> None:
    library: Any = torch.library.Library
    libraries = {name: library(name, "IMPL") for name in catalog.NAMESPACES}
    _libraries.extend(libraries.values())
    for name, op in catalog.all_ops():
        namespace, _, rest = name.partition("::")
        libraries[namespace].impl(rest, _kernel(name, op), torch_private.KEY, with_keyset=True)


def _uninstall() -> None:
    while _libraries:
        torch_private.restore_kernels(_libraries.pop())


def add(sink: Sink) -> None:
    """Let ``sink`` see every collective from now on. The first sink installs the kernels."""
    with _lock:
        if not _libraries:
            _install()
        _Shown.sinks = (*_Shown.sinks, sink)


def remove(sink: Sink) -> None:
    """Stop showing collectives to ``sink``; the last one takes the kernels away. Unknown sinks are ignored."""
    with _lock:
        silence(sink)
        if not _Shown.sinks:
            _uninstall()


def silence(sink: Sink) -> None:
    """Stop showing collectives to ``sink`` and leave the kernels in place: what a sink may do from inside one."""
    _Shown.sinks = tuple(shown for shown in _Shown.sinks if shown != sink)


def installed() -> bool:
    """Whether the kernels are in place."""
    return bool(_libraries)


def _forget() -> None:
    _Shown.sinks = ()


# A forked worker keeps the kernels (taking them away would need locks a fork may have left held) but shows nobody.
os.register_at_fork(after_in_child=_forget)


@atexit.register
def _restore() -> None:
    # Collectives of C++ destructors must not meet Python kernels in a dying interpreter.
    with _lock:
        _Shown.sinks = ()
        _uninstall()
