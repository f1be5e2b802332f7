"""Module names, the module tree and module data in the form of torch's CommDebugMode.

Names start with the class of the outermost module: ``MLPModule.net1``. Each name has one place in the tree, below
``Global``: where it was first called.
"""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from commwatch.agent.debug import torch_private
from commwatch.agent.debug.comm_frames import Place, call_of, calls, place
from commwatch.agent.recorder.torch_private import current_autograd_node, node_sequence_number, sequence_number

GLOBAL = "Global"
_ACCUMULATES = 1 << 62
"""Nodes that add up gradients have no number of their own but one beyond it, so that they run first."""

MAX_THREADS = 1_000
"""Threads whose forwards are remembered for a backward on another thread."""

MAX_CHECKPOINTED = 100_000
"""Checkpointed functions whose module is remembered, by identity: checkpointing keeps them until they run again."""


class Names:
    """Name of every module seen, by identity: class of the first module called, then attribute names."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def known(self, module: nn.Module) -> str | None:
        """The name; None for a module that was never seen."""
        found = self._known.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def of(self, module: nn.Module) -> str:
        """The name; learns those of all modules below at first sight."""
        name = self.known(module)
        if name is None:
            name = type(module).__name__
            self._learn(module, name)
        return name

    def _learn(self, module: nn.Module, name: str) -> None:
        below = [(module, name)]
        while below:
            module, name = below.pop()
            new = self.known(module) is None
            self._remember(module, name)
            if new:
                below += [(child, f"{name}.{path}") for path, child in reversed([*module.named_children()])]

    def _remember(self, module: nn.Module, name: str) -> None:
        identity, known = id(module), self._known

        def forget(reference: weakref.ref[nn.Module]) -> None:
            found = known.get(identity)
            if found is not None and found[0] is reference:
                del known[identity]

        known[identity] = (weakref.ref(module, forget), name)


class Ranges:
    """Which module made the autograd nodes of one thread, by their sequence numbers.

    At each op and each start and end of a module, the numbers given since the last note go to the module that runs.
    """

    LIMIT = 200_000
    """Ranges kept; beyond it the older half is dropped, and nodes older than that belong to ``Global``."""

    def __init__(self) -> None:
        self._cursor = sequence_number()
        self._kept: tuple[list[tuple[int, int]], list[str]] = ([], [])
        self._again: tuple[list[tuple[int, int]], list[str]] = ([], [])

    def note(self, name: str, again: bool) -> None:
        """The numbers given since the last note belong to ``name``; ``again`` when a forward ran once more."""
        now = sequence_number()
        if now <= self._cursor:
            return
        spans, names = self._again if again else self._kept
        if names and names[-1] == name and spans[-1][1] == self._cursor:
            spans[-1] = (spans[-1][0], now)
        else:
            spans.append((self._cursor, now))
            names.append(name)
            if len(names) > self.LIMIT:
                del spans[: self.LIMIT // 2], names[: self.LIMIT // 2]
        self._cursor = now

    def find(self, number: int, again: bool) -> str | None:
        """Module of the node of this number; None when it was made before the first note, or not on this thread."""
        spans, names = self._again if again else self._kept
        position = bisect_right(spans, (number, _ACCUMULATES)) - 1
        return names[position] if position >= 0 and number < spans[position][1] else None


class _Thread(threading.local):
    """What the tracker keeps for each thread."""

    def __init__(self) -> None:
        self.ranges: Ranges | None = None
        self.generation = 0
        self.last: tuple[int, str] = (-1, GLOBAL)
        self.quiet = False


class CommModuleTracker:
    """Which module runs, and the module data of torch's ``advanced_module_tracker``, under torch's names.

    Two global hooks, no hook on any module; the answers come off the Python frames and the autograd node. Nothing that
    fails in a hook reaches the job: ``on_error`` is told.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self.module_helper_dict: dict[str, dict[str, Any]] = {}
        self.module_parameters_dict: dict[str, dict[str, Any]] = {}
        self.module_parents_dict: dict[str, set[str]] = {}
        self.parent_dict: dict[str, list[str]] = {}
        self.sharding_dict: dict[str, Any] = {}
        self._names = Names()
        self._thread = _Thread()
        self._ranges: list[Ranges] = []
        self._generation = 0
        self._outside: set[int] = set()
        self._checkpointed: dict[int, str] = {}
        self._handles: list[Any] = []
        self._lock = threading.RLock()

    def clear(self) -> None:
        """Forget everything but names."""
        with self._lock:
            self.module_parameters_dict.clear()
            self.sharding_dict.clear()
            self.parent_dict.clear()
            self.module_helper_dict.clear()
            self.module_helper_dict[GLOBAL] = {"depth": 0}
            self.module_parents_dict.clear()
            self.module_parents_dict[GLOBAL] = set()
            self._ranges = []
            self._checkpointed.clear()
            self._generation += 1
        self._of_thread()

    def install(self) -> None:
        """Register the hooks. Module calls that run already on this thread do not count."""
        self._outside = {id(frame) for frame in calls(sys._getframe(1))}
        register = nn.modules.module
        self._handles = [
            register.register_module_forward_pre_hook(self._before),
            register.register_module_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()

    @property
    def quiet(self) -> bool:
        """Whether the ops of this thread are the tracker's own right now."""
        return self._thread.quiet

    @property
    def is_bw(self) -> bool:
        """Whether this thread runs a backward."""
        return torch_private.backward_number() != -1

    @property
    def name(self) -> str:
        """The module that runs on this thread, or whose backward runs; ``Global`` for none."""
        return self.locate(sys._getframe(1))[0]

    @property
    def parents(self) -> set[str]:
        """Names of the running module and of all above it; always with ``Global``."""
        return self.module_parents_dict[self.name] | {GLOBAL}

    @property
    def activation_checkpointing(self) -> bool:
        """Whether this thread runs a forward once more in backward."""
        return self.locate(sys._getframe(1))[2]

    def get_known_fqn(self, mod: nn.Module) -> str | None:
        """Name of a module; None for one that was never seen."""
        return self._names.known(mod)

    def print_paramater_info(self) -> None:
        """Print the parameters of each module. The name is torch's."""
        print(self.module_parameters_dict)  # noqa: T201  printing is what the method is for

    def print_sharding_info(self) -> None:
        """Print the placements of each parameter that is a DTensor."""
        for key, value in self.sharding_dict.items():
            print(f"{key}: {value}")  # noqa: T201  printing is what the method is for

    def locate(self, frame: FrameType | None) -> tuple[str, bool, bool]:
        """(module, in backward, computed again) of the op above ``frame``, and note what it made."""
        backward = torch_private.backward_number()
        at = place(frame, backward != -1, self._outside)
        name = self._name_at(at, backward)
        self._of_thread().note(name, at.again)
        return name, backward != -1, at.again

    def _name_at(self, at: Place, backward: int) -> str:
        if at.module is not None:
            name = self._names.known(at.module)
            if name in self.module_helper_dict:
                found = str(name)
            else:
                found = self._enter(at.module, at.call, backward) if at.call is not None else GLOBAL
        elif backward == -1:
            found = GLOBAL
        elif at.again and at.function in self._checkpointed:
            found = self._checkpointed[at.function]
        else:
            found = self._made_node(at.nested, backward)
        if backward != -1:
            self._thread.last = (backward, found)
        elif at.function and len(self._checkpointed) < MAX_CHECKPOINTED:
            self._checkpointed[at.function] = found
        return found

    def _made_node(self, nested: bool, backward: int) -> str:
        """Module whose forward made the node that runs on this thread."""
        node = current_autograd_node()
        number = node_sequence_number(node) if node is not None else 0
        if number >= _ACCUMULATES:
            task, last = self._thread.last
            return last if task == backward else GLOBAL
        if node is None:
            return GLOBAL
        own = self._of_thread()
        found = own.find(number, True) if nested else None
        found = found or own.find(number, False)
        if found is None:
            others = {ranges.find(number, False) for ranges in self._ranges if ranges is not own} - {None}
            found = others.pop() if len(others) == 1 else None
        return found or GLOBAL

    def _of_thread(self) -> Ranges:
        thread = self._thread
        if thread.ranges is None or thread.generation != self._generation:
            with self._lock:
                thread.ranges = Ranges()
                thread.generation = self._generation
                if len(self._ranges) < MAX_THREADS:
                    self._ranges.append(thread.ranges)
        return thread.ranges

    def _before(self, module: nn.Module, _args: Any) -> None:
        if is_compiling():
            return
        try:
            call = call_of(sys._getframe(1))
            if call is not None:
                self._outside.discard(id(call))
                self._start(module, call)
        except Exception as error:  # noqa: BLE001  attribution may fail, the job's forward may not
            self._on_error(error)

    def _start(self, module: nn.Module, call: FrameType) -> None:
        backward = torch_private.backward_number()
        if place(call, backward != -1, self._outside).call is call:  # else a graph of the compiler
            self.locate(call.f_back)
            self._enter(module, call, backward)

    def _after(self, module: nn.Module, _args: Any, _output: Any) -> None:  # noqa: ARG002  torch's signature
        if is_compiling():
            return
        try:
            self.locate(sys._getframe(1))
        except Exception as error:  # noqa: BLE001  attribution may fail, the job's forward may not
            self._on_error(error)

    def _enter(self, module: nn.Module, call: FrameType, backward: int) -> str:
        """Give the module its place in the tree and note its data, as they are at this call."""
        with self._lock:
            above = place(call.f_back, backward != -1, self._outside)
            name = self._names.of(module)
            new = name not in self.module_helper_dict
            if new:
                parent = self._name_at(above, backward)
                self.module_parents_dict[name] = self.module_parents_dict[parent] | {parent, name}
                self.module_helper_dict[name] = {"depth": len(self.module_parents_dict[name]) - 1}
                self.parent_dict.setdefault(parent, []).append(name)
            if new or backward == -1:
                self._describe(module, name)
        return name

    def _describe(self, module: nn.Module, name: str) -> None:
        helper = self.module_helper_dict[name]
        helper["module_type"] = str(type(module)).replace("<", "").replace(">", "")
        self._thread.quiet = True
        try:
            for parameter_name, parameter in module.named_parameters(recurse=False):
                data = parameter.data
                self.module_parameters_dict.setdefault(name, {})[parameter_name] = data
                if isinstance(data, torch_private.DTensor):
                    self.sharding_dict[f"{name}.{parameter_name}"] = data.placements
                    helper.setdefault("parameters", {})[parameter_name] = str(data.placements)
        finally:
            self._thread.quiet = False


for _hook in (CommModuleTracker._before, CommModuleTracker._after):  # noqa: SLF001  own hooks, by name
    torch_private.skip_in_compiler(_hook)
