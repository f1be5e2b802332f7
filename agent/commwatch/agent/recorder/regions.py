"""Where a collective inside a compiled region comes from: read from metadata the compiler keeps with its graphs.

Two things are joined, both there whether the region was compiled now or taken from a cache. The graph dynamo traced is
reachable from the program's frame while the region's forward runs; its nodes know their module and stack. The code that
runs (an FX graph's, or inductor's with its line map) knows the stack its collective was traced from. A stack is
compared by file, function and text of its lines: a cache may hold the line numbers of an older state of the program.

A place that cannot be known stays unknown: a region whose forward communicates nothing, a backward of another region
with the same stack. Layers that share one stack give their folded name, ``layers.*``.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from commwatch.agent.recorder import codes, torch_private
from commwatch.agent.recorder.modules import ROOT, clean, fold

MAX_REGIONS = 10_000
"""Compiled functions remembered; collectives of further ones have no module."""

_FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)\n((?:    .*\n)*)')
_PATH = re.compile(r"([LG])\['(\w+)'\]\.?(.*)$")
_ITEM = re.compile(r"(?:\._modules)?\[['\"]?(\w+)['\"]?\]")
_ASSIGNED = re.compile(r"\s*(\w+)(?:\s*:[^=]+)?\s*=\s*torch\.ops\.\w+\.(\w+)")
_SOURCES = re.compile(r"\s*# Topologically Sorted Source Nodes: \[(.*?)\]")
_METHODS = frozenset({"forward", "_call_impl", "_wrapped_call_impl"})
"""Functions whose first argument is the module they are a call of."""

_COMMENTS = 3
"""Lines above a call in inductor's code in which its source nodes stand."""

Key = tuple[tuple[str, str, str], ...]
"""(file without its folder, function, text) of each frame of a stack, outermost first. The text marks the call where
Python does. The folder is left out: inductor's cache hands out code that it made for the same program elsewhere.
"""


class Place(NamedTuple):
    """A line of the user's program, known from metadata instead of a frame."""

    file: str
    line: int
    function: str


Placements = tuple[tuple[Any, ...], tuple[Any, ...]]
"""DTensor placements before and after."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a graph. ``path`` leads to its module: empty for the function's own, None when there is none."""

    key: Key
    path: str | None
    place: Place | None
    redistribute: Placements | None = None


@dataclass(slots=True)
class _Region:
    """A function dynamo compiled: its nodes by name and by stack, and the variable its modules are reached from."""

    nodes: dict[str, _Node]
    scope: str
    variable: str
    by_key: dict[Key, list[_Node]] = field(default_factory=dict)


def parse(stack: str) -> list[tuple[str, int, str, str]]:
    """(file, line, function, text) of each frame of a formatted stack, outermost first."""
    return [(file, int(line), name, text) for file, line, name, text in _FRAME.findall(stack)]


def relative(path: str) -> tuple[str, str, str]:
    """(``L`` or ``G``, variable, name below it) of a path such as ``L['self'].layers[0]``; empty for another form."""
    head, bracket, rest = path.partition("]")
    found = _PATH.match(head + bracket + _ITEM.sub(r".\1", rest))
    return (found[1], found[2], clean(found[3], in_ddp=False)) if found else ("", "", "")


class Regions:
    """The compiled regions of this process whose forward communicated."""

    def __init__(self) -> None:
        self._regions: dict[int, tuple[Any, _Region | None]] = {}
        self._by_key: dict[Key, list[_Node]] = {}
        self._found: dict[tuple[int, int, int], tuple[Any, list[_Node], Place | None]] = {}

    def of_caller(self, frame: FrameType) -> _Region | None:
        """The region that runs in this frame of a function dynamo compiled; None when its graph is out of reach."""
        code = frame.f_code
        known = self._regions.get(id(code))
        if known is not None:
            return known[1]
        if len(self._regions) >= MAX_REGIONS:
            return None
        names = [name for name in code.co_names if name.startswith(torch_private.COMPILED_NAME)]
        graph = torch_private.traced_graph(frame.f_globals.get(names[0])) if len(names) == 1 else None
        region = _learn(graph, own=code.co_name in _METHODS) if graph is not None else None
        self._regions[id(code)] = (code, region)
        for key, nodes in region.by_key.items() if region is not None else ():
            self._by_key.setdefault(key, []).extend(nodes)
        self._found.clear()
        return region

    def node(self, frame: FrameType, meaning: int, region: _Region | None) -> tuple[list[_Node], Place | None]:
        """What the collective that ``frame`` issues may have been traced from, and its line. Empty when unknown."""
        place = (id(frame.f_code), frame.f_lineno or 0, id(region))
        known = self._found.get(place)
        if known is None:
            if len(self._found) >= MAX_REGIONS:
                self._found.clear()
            known = self._found[place] = (frame.f_code, *self._look(frame, meaning, region))
        return known[1], known[2]

    def redistribute(self, nodes: Iterable[_Node]) -> Placements | None:
        """The explicit redistribute that these nodes come from: where all that dynamo traced there is that one."""
        found = {
            known.redistribute for node in nodes for known in self._by_key.get(node.key, ()) if known.path == node.path
        }
        return found.pop() if len(found) == 1 else None

    def _look(self, frame: FrameType, meaning: int, region: _Region | None) -> tuple[list[_Node], Place | None]:
        if meaning == codes.GRAPH:
            return self._of_graph(frame)
        path, line = frame.f_code.co_filename, frame.f_lineno or 0
        key = _key(parse(torch_private.inductor_stack(path, line)))
        if region is not None:
            nodes = [node for node in map(region.nodes.get, _source_nodes(path, line)) if node and node.key == key]
            if nodes:
                return nodes, nodes[0].place
        return self._same_stack(key)

    def _of_graph(self, frame: FrameType) -> tuple[list[_Node], Place | None]:
        found = _ASSIGNED.match(linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0))
        module = frame.f_locals.get("self")
        if codes.CLEARABLE_LOCALS:
            frame.f_locals.clear()
        graph = getattr(module, "graph", None)
        node = next((node for node in graph.nodes if node.name == found[1]), None) if found and graph else None
        described = _describe(node, own=False) if node is not None else None
        if described is None:
            return [], None
        return ([described], described.place) if described.path else self._same_stack(described.key)

    def _same_stack(self, key: Key) -> tuple[list[_Node], Place | None]:
        nodes = self._by_key.get(key, []) if key else []
        places = {node.place for node in nodes}
        return nodes, places.pop() if len(places) == 1 else None


def module_of(nodes: Iterable[_Node], base: str, outside: str = "") -> str:
    """Name of the module of these nodes; folded when they differ in layer numbers alone, empty when in more.

    ``base``: name of what their paths start from. ``outside``: module of the nodes that have none.
    """
    names = {outside if node.path is None else _below(base, relative(node.path)[2]) for node in nodes}
    if len(names) > 1:
        names = {fold(name) for name in names}
    return names.pop() if len(names) == 1 else ""


def _below(base: str, name: str) -> str:
    if not name or not base:
        return base
    return name if base == ROOT else f"{base}.{name}"


def _learn(graph: Any, *, own: bool) -> _Region | None:
    """None when modules are reached from several variables: then no name can be given."""
    nodes = {node.name: found for node in graph.nodes if (found := _describe(node, own=own)) is not None}
    roots = {relative(node.path)[:2] for node in nodes.values() if node.path}
    if len(roots) > 1:
        return None
    scope, variable = roots.pop() if roots else ("L", "self") if own else ("", "")
    region = _Region(nodes, scope, variable)
    for node in nodes.values():
        region.by_key.setdefault(node.key, []).append(node)
    return region


def _describe(node: Any, *, own: bool) -> _Node | None:
    """``own``: the graph is a module's forward, so that a node without a module is that module's."""
    stack = node.meta.get("stack_trace")
    if node.op in {"placeholder", "output"} or not stack:
        return None
    frames = parse(stack)
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(modules[-1][0]) if modules else "" if own else None
    return _Node(_key(frames), path, _place(frames), _redistributed(node))


def _redistributed(node: Any) -> Placements | None:
    """Placements of the DTensors before and after a node that is a call of ``DTensor.redistribute``."""
    if node.op != "call_method" or node.target != "redistribute":
        return None
    before, after = (getattr(each.meta.get("example_value"), "placements", None) for each in (node.args[0], node))
    return (tuple(before), tuple(after)) if before and after and before != after else None


def _key(frames: list[tuple[str, int, str, str]]) -> Key:
    return tuple((os.path.basename(file), function, text) for file, _, function, text in frames)  # noqa: PTH119  hot


def _place(frames: list[tuple[str, int, str, str]]) -> Place | None:
    for file, line, function, _ in reversed(frames):
        if codes.of_user(file):
            return Place(file, line, function)
    return None


def _source_nodes(path: str, line: int) -> list[str]:
    for above in range(1, _COMMENTS + 1):
        found = _SOURCES.match(linecache.getline(path, line - above))
        if found:
            return [name.strip() for name in found[1].split(",")]
    return []
