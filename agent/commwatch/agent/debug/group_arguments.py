"""Finds the process group among an op's arguments: torch prints an address, or a name that counts groups."""

from __future__ import annotations

from typing import Any

from commwatch.agent.debug import torch_private as private
from commwatch.agent.debug.snapshot import GroupText
from commwatch.agent.recorder import meshes
from commwatch.agent.recorder.groups import UNKNOWN, Groups

_NAMESPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::", "_dtensor::")


class GroupArguments:
    """``groups`` knows the meshes; without it, those that live when a group is first shown are learned then."""

    def __init__(self, groups: Groups | None = None) -> None:
        self._groups = groups if groups is not None else Groups()
        self._learned = groups is not None

    @staticmethod
    def positions(op: Any) -> tuple[int, ...]:
        """Positions of the op's process group arguments; empty for an op that is no collective."""
        if not op.__qualname__.startswith(_NAMESPACES):
            return ()
        arguments = private.schema(op).arguments
        return tuple(
            index
            for index, argument in enumerate(arguments)
            if argument.name == "group_name" or "ProcessGroup" in str(argument.type)
        )

    def replaced(self, values: tuple[Any, ...], args: tuple[Any, ...], positions: tuple[int, ...]) -> tuple[Any, ...]:
        """The snapshots with those of groups exchanged for ones that know their group."""
        found = list(values)
        for position in positions:
            if position < len(args):
                name = args[position]
                known = self._groups.by_name.get(name) if type(name) is str else None
                if known is None:
                    group = private.process_group_of(name)
                    if group is None:
                        continue
                    name = group.group_name
                    known = self._groups.of(group)
                shown = found[position]
                found[position] = GroupText(str(shown), shown, known, name, self._dimension)
        return tuple(found)

    def _dimension(self, group_name: str) -> str | None:
        if not self._learned:
            self._learned = True
            meshes.learn_living(self._groups)
        name = self._groups.named(group_name).name
        return None if name == UNKNOWN.name else name
