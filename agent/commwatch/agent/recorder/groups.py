"""Identity of process groups in terms that are equal on every rank and at every commit."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from commwatch.agent.recorder import torch_private


@dataclass(frozen=True, slots=True)
class Group:
    """Mesh dimension or description, number of ranks, distance of consecutive global ranks (0: not constant)."""

    name: str
    size: int
    stride: int

    key: str = field(init=False, repr=False, compare=False)
    """What ``str`` shows, made once: a text's hash is kept, a dataclass's is computed at every look-up."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.name}(size {self.size}, stride {self.stride})")

    def __str__(self) -> str:
        """Such as ``tp(size 2, stride 1)``."""
        return self.key


UNKNOWN = Group("unknown", 0, 0)


def stride_of(ranks: list[int]) -> int:
    """Distance of consecutive ranks; 0 when it is not constant or there are fewer than two."""
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    return steps.pop() if len(steps) == 1 else 0


class Groups:
    """Process groups seen, by torch's group name (unique in a process), and the device meshes that name them."""

    LIMIT = 10_000
    """Groups and meshes remembered; a job that makes groups for ever forgets names and looks them up again."""

    def __init__(self, on_seen: Callable[[Any, Group], None] = lambda *_: None) -> None:
        """``on_seen`` is told of a ProcessGroup and its identity when it is looked up, and again when that changed."""
        self.by_name: dict[str, Group] = {}
        self.on_seen = on_seen
        self._meshes: list[weakref.ref[Any]] = []
        self._dimensions: dict[str, str] = {}
        self.mesh: tuple[tuple[str, int], ...] = ()

    def learn_mesh(self, mesh: Any) -> None:
        """A DeviceMesh was made: its dimensions may name groups that exist already."""
        if len(self._meshes) >= self.LIMIT:
            self._meshes = [reference for reference in self._meshes if reference() is not None][-self.LIMIT // 2 :]
        self._meshes.append(weakref.ref(mesh))
        self.by_name.clear()
        shape = tuple(int(size) for size in mesh.shape)
        names = mesh.mesh_dim_names or tuple(f"dim{index}" for index in range(len(shape)))
        dimensions = tuple(zip(names, shape, strict=True))
        if _count(dimensions) > _count(self.mesh) or not self.mesh:
            self.mesh = dimensions
        if len(self._dimensions) >= self.LIMIT:
            self._dimensions.clear()
        for group_name, dimension in _dimension_groups(mesh):
            self._dimensions.setdefault(group_name, dimension)

    def of(self, group: Any) -> Group:
        """Identity of a ProcessGroup."""
        name = group.group_name
        found = self.by_name.get(name)
        if found is None:
            if len(self.by_name) >= self.LIMIT:
                self.by_name.clear()
            ranks = torch_private.group_ranks(group)
            label = self._dimension(name) or _label(group.group_desc)
            found = self.by_name[name] = Group(label, int(group.size()), stride_of(ranks))
            self.on_seen(group, found)
        return found

    def named(self, name: str) -> Group:
        """Identity of a group that an op gives by its name alone."""
        return self.by_name.get(name) or Group(self._dimension(name) or "unknown", 0, 0)

    def _dimension(self, group_name: str) -> str | None:
        found = self._dimensions.get(group_name)
        if found is not None:
            return found
        # A sliced or flattened mesh is given its groups after it was made.
        for reference in self._meshes:
            mesh = reference()
            for name, dimension in _dimension_groups(mesh) if mesh is not None else ():
                if name == group_name:
                    return self._dimensions.setdefault(name, dimension)
        return None


def _dimension_groups(mesh: Any) -> list[tuple[str, str]]:
    """(group name, dimension name) of a mesh; empty when it has no groups, such as one of other ranks."""
    names = mesh.mesh_dim_names or tuple(f"dim{index}" for index in range(mesh.ndim))
    groups = [torch_private.mesh_group(mesh, index) for index in range(mesh.ndim)]
    return [(str(group.group_name), str(name)) for group, name in zip(groups, names, strict=True) if group is not None]


def _count(dimensions: tuple[tuple[str, int], ...]) -> int:
    total = 1
    for _, size in dimensions:
        total *= size
    return total


def _label(description: str) -> str:
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    return "group" if description in {"", "undefined"} else description
