"""Counts of collectives as the tree of modules that issued them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from commwatch.agent.recorder.modules import ROOT


@dataclass(slots=True)
class ModuleCounts:
    """A module's collectives, by (phase, canonical kind): ``own`` are issued by itself, ``total`` by its parts as well.

    So ``total`` is ``own`` and the children's ``total`` together, at every node. The node without a name is the whole
    program: its own are the collectives that no module issued, or that could not be traced to one.
    """

    name: str
    own: Counter[tuple[str, str]] = field(default_factory=Counter)
    total: Counter[tuple[str, str]] = field(default_factory=Counter)
    children: list[ModuleCounts] = field(default_factory=list)

    def walk(self) -> Iterator[ModuleCounts]:
        """This node and every one below it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def find(self, name: str) -> ModuleCounts:
        """The node of a module. Raises KeyError when it issued nothing, nor did any part of it."""
        for node in self.walk():
            if node.name == name:
                return node
        raise KeyError(
            f"no collective of module {name!r}: there are {', '.join(n.name for n in self.walk() if n.name)}"
        )

    def __str__(self) -> str:
        """An indented tree: each module's totals by phase, and its own where they differ."""
        return "\n".join(_lines(self, 0))


def _lines(node: ModuleCounts, depth: int) -> Iterator[str]:
    own = "" if node.own == node.total else f"; own: {_text(node.own)}"
    yield f"{'  ' * depth}{node.name or '(program)'}: {_text(node.total)}{own}"
    for child in node.children:
        yield from _lines(child, depth + 1)


def _text(counts: Counter[tuple[str, str]]) -> str:
    phases: dict[str, list[str]] = {}
    for (phase, kind), count in counts.items():
        phases.setdefault(phase, []).append(f"{kind} {count}")
    return ", ".join(f"{phase} {' '.join(kinds)}" for phase, kinds in phases.items()) or "none"


def tree(calls: Iterable[tuple[str, str, str]], roots: frozenset[str] = frozenset()) -> ModuleCounts:
    """The tree of (module, phase, kind) of each call. ``roots`` names outermost modules beside the first one."""
    program = ModuleCounts("")
    nodes = {"": program}

    def node(name: str) -> ModuleCounts:
        found = nodes.get(name)
        if found is None:
            found = nodes[name] = ModuleCounts(name)
            node(_parent(name, roots)).children.append(found)
        return found

    for module, phase, kind in calls:
        node(module).own[phase, kind] += 1
        name = module
        while name:
            nodes[name].total[phase, kind] += 1
            name = _parent(name, roots)
        program.total[phase, kind] += 1
    return program


def _parent(name: str, roots: frozenset[str]) -> str:
    if name == ROOT or name in roots:
        return ""
    return name.rpartition(".")[0] or ROOT
