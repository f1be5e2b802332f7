"""Tells which DeviceMesh dimensions exist: a dimension that spans the world reuses the default group's name."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

from commwatch.agent.recorder.groups import Groups

_watching: list[Groups] = []
_original: Callable[..., None] | None = None


def _mesh_class() -> Any:
    return getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)


def watch(groups: Groups) -> None:
    """Show ``groups`` every mesh that is made from now on, until ``unwatch``."""
    global _original
    mesh_class = _mesh_class()
    if mesh_class is None:
        return
    if _original is None:
        _original = mesh_class.__init__
        mesh_class.__init__ = _watched(_original)
    _watching.append(groups)


def unwatch(groups: Groups) -> None:
    """Stop; the last one restores DeviceMesh as it was."""
    global _original
    if groups in _watching:
        _watching.remove(groups)
    if not _watching and _original is not None:
        _mesh_class().__init__ = _original
        _original = None


def learn_living(groups: Groups) -> None:
    """Show ``groups`` the meshes that exist already, outermost first. Walks the whole heap: not for a hot path."""
    mesh_class = _mesh_class()
    living = [candidate for candidate in gc.get_objects() if type(candidate) is mesh_class]
    for mesh in sorted(living, key=lambda mesh: -mesh.ndim):
        groups.learn_mesh(mesh)


def _watched(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # A mesh without a name costs attribution, never the job.
        with contextlib.suppress(Exception):
            for groups in _watching:
                groups.learn_mesh(self)

    return initialize


os.register_at_fork(after_in_child=_watching.clear)
