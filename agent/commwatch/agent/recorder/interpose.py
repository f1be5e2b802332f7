"""Puts a Python kernel in front of every collective's kernel, and takes it away again.

The recorder costs nothing per other op: only collectives pass here. ``Library._destroy`` restores the original
kernels exactly.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from commwatch.agent.recorder import catalog, torch_private

Sink = Callable[[catalog.Op, tuple[Any, ...]], None]
"""Called with the op and its arguments before the collective runs. Must never raise and must not keep the arguments."""

_sinks: list[Sink] = []
_libraries: list[Any] = []
_lock = threading.Lock()


def _kernel(op: catalog.Op, original: Any) -> Callable[..., Any]:
    call_boxed = original.call_boxed
    sinks = _sinks

    def recorded(keyset: Any, *args: Any) -> Any:
        for sink in sinks:
            sink(op, args)
        return call_boxed(keyset, *args)

    return recorded


def _install() -> None:
    library: Any = torch.library.Library
    libraries = {name: library(name, "IMPL") for name in catalog.NAMESPACES}
    with warnings.catch_warnings():
        # torch says once that a kernel was overridden: that is what happens here, on purpose.
        warnings.simplefilter("ignore")
        for name, op in catalog.all_ops():
            namespace, _, rest = name.partition("::")
            for key in torch_private.DISPATCH_KEYS:
                if torch_private.has_kernel(name, key):
                    original = torch.library.get_kernel(name, key)
                    libraries[namespace].impl(rest, _kernel(op, original), key, with_keyset=True, allow_override=True)
    _libraries.extend(libraries.values())


def _uninstall() -> None:
    while _libraries:
        torch_private.restore_kernels(_libraries.pop())


def add(sink: Sink) -> None:
    """Let ``sink`` see every collective from now on. The first sink installs the kernels."""
    with _lock:
        if not _libraries:
            _install()
        _sinks.append(sink)


def remove(sink: Sink) -> None:
    """Stop showing collectives to ``sink``; the last one takes the kernels away. Unknown sinks are ignored."""
    with _lock:
        if sink in _sinks:
            _sinks.remove(sink)
        if not _sinks:
            _uninstall()


def installed() -> bool:
    """Whether the kernels are in place."""
    return bool(_libraries)


def _forget() -> None:
    _sinks.clear()


# A forked worker keeps the kernels (taking them away would need locks a fork may have left held) but shows nobody.
os.register_at_fork(after_in_child=_forget)


@atexit.register
def _restore() -> None:
    # Collectives of C++ destructors must not meet Python kernels in a dying interpreter.
    with _lock:
        _sinks.clear()
        _uninstall()
