"""Names of modules, and which module an autograd node came from.

Names are fully qualified from the outermost module ever called. Nothing here keeps a module alive.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling

from commwatch.agent.recorder.codes import raised_by_signal
from commwatch.agent.recorder.cost import SAMPLED
from commwatch.agent.recorder.intervals import Intervals
from commwatch.agent.recorder.torch_private import (
    called_by_compiler,
    current_autograd_node,
    is_graph_module,
    uncompiled,
)

ROOT = "(root)"
_CHECKPOINT_FILE = f"{os.sep}torch{os.sep}utils{os.sep}checkpoint.py"
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def fold(name: str) -> str:
    """Replace every layer number: ``layers.3.wo`` becomes ``layers.*.wo``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def clean(name: str, in_ddp: bool) -> str:
    """Drop what wrappers put into a name, so that wrapping a model does not rename its modules."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if in_ddp and parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def _class_name(module: nn.Module) -> str:
    """Name of the user's class: fully_shard puts a class of its own before it."""
    return next(kind.__name__ for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))


def _members(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, module) below a root; the root alone where its own ``named_modules`` fails."""
    try:
        return list(root.named_modules())
    except Exception:  # noqa: BLE001  a user's override, or a module without a hash
        return [("", root)]


class ModuleNames:
    """Name of every module seen, by identity."""

    LIMIT = 200_000
    """Modules remembered; beyond it a new module is named by its class alone."""

    LEARN_AGAIN = 16
    """How often a root that is known is walked once more for a module it did not hold before."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._passing: set[int] = set()
        self._parameters: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._reduced: dict[int, weakref.ref[nn.Module]] = {}
        self._walks_left = self.LEARN_AGAIN
        self._root: weakref.ref[nn.Module] | None = None
        self.roots: set[str] = set()
        self.version = 0

    def known(self, module: nn.Module) -> str | None:
        """The module's name, or None when it was never learned."""
        found = self._by_id.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def by_identity(self, identity: int) -> str:
        """Name of the living module of this identity; empty when there is none."""
        found = self._by_id.get(identity)
        return found[1] if found is not None else ""

    def name(self, module: nn.Module, outermost: nn.Module, parent: str) -> str:
        """The module's name; learns the outermost module of the call when it is new.

        A module that is not part of it, such as one made in the parent's forward, is named by the parent and its class.
        """
        found = self.known(module)
        if found is not None:
            return found
        if self.known(outermost) is None:
            self.learn(outermost)
        elif self._walks_left:
            self._walks_left -= 1
            self.learn(outermost)
        found = self.known(module)
        if found is None:
            found = f"{parent or ROOT}.{_class_name(module)}".removeprefix(f"{ROOT}.")
            self._remember(module, found)
            self._passing.add(id(module))
        return found

    def learn(self, root: nn.Module) -> None:
        """Name every module under ``root``. The first root, or one that contains it, gives names without a prefix."""
        first = self._root() if self._root is not None else None
        members = _members(root)
        if first is None or any(module is first for _, module in members):
            self._root = weakref.ref(root)
            prefix = ""
        else:
            prefix = _class_name(root)
            self.roots.add(prefix)
        in_ddp = type(root).__name__ == "DistributedDataParallel"
        for path, module in members:
            name = clean(path, in_ddp)
            full = f"{prefix}.{name}" if prefix and name else prefix or name
            self._remember(module, full or ROOT)
            self._remember_parameters(module)
        self.version += 1

    def _remember(self, module: nn.Module, name: str) -> None:
        identity = id(module)
        if len(self._by_id) >= self.LIMIT and identity not in self._by_id:
            return
        by_id, passing = self._by_id, self._passing
        passing.discard(identity)

        def forget(reference: weakref.ref[nn.Module]) -> None:
            found = by_id.get(identity)
            if found is not None and found[0] is reference:
                del by_id[identity]
                passing.discard(identity)

        by_id[identity] = (weakref.ref(module, forget), name)

    def _remember_parameters(self, module: nn.Module) -> None:
        reference = weakref.ref(module)
        if len(self._parameters) >= self.LIMIT:
            self._parameters.clear()
            self._reduced.clear()
        for attribute, parameter in vars(module).get("_parameters", {}).items():
            known = self._parameters.get(id(parameter))
            if known is None or known[0]() is None:
                self._parameters[id(parameter)] = (reference, attribute)
        if type(module).__name__ == "DistributedDataParallel":
            self._reduced.update((id(parameter), reference) for parameter in module.parameters())

    def of_parameter(self, parameter: Any) -> str:
        """Name of the module that reduces a parameter's gradient: DDP's for all of its own, else the one that has it.

        Empty when it is not known.
        """
        found = self._parameters.get(id(parameter))
        owner = found[0]() if found is not None else None
        if found is None or owner is None or vars(owner)["_parameters"].get(found[1]) is not parameter:
            return ""
        reducing = self._reduced.get(id(parameter))
        reducer = reducing() if reducing is not None else None
        return self.known(reducer if reducer is not None else owner) or ""

    def inventory(self) -> list[tuple[str, int]]:
        """(folded name, number of living modules) of the roots' own modules, sorted by name."""
        known = list(self._by_id.items())
        counts = Counter(fold(name) for identity, (_, name) in known if identity not in self._passing)
        return sorted(counts.items())


def in_checkpoint() -> bool:
    """Whether the caller runs inside reentrant activation checkpointing, which calls its module without gradients."""
    frame = sys._getframe(1)
    for _ in range(16):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_filename.endswith(_CHECKPOINT_FILE):
            return True
    return False


class CallStack(threading.local):
    """Module calls running on this thread, outermost first, by identity.

    ``outermost`` refers weakly to the outermost module; ``grad`` says whether its call is to be differentiated. After
    ``after_child`` the innermost running call may be the last one, or still its child's, whose own output hooks run
    after the hook that took it from the list: ``closing`` holds such children, each with the depth of its caller.
    """

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.closing: list[tuple[int, int]] = []
        self.after_child = False
        self.outermost: weakref.ref[nn.Module] | None = None
        self.grad = True


class _Closing:
    """The last of a module's own output hooks while it is called: only then is its call over.

    Parallel styles redistribute in such hooks, which run after the global one. A copy of the module made meanwhile
    shares it.
    """

    __slots__ = ("_tracker",)

    def __init__(self, tracker: ModuleTracker) -> None:
        self._tracker = tracker

    def __deepcopy__(self, memo: Any) -> _Closing:
        return self

    @uncompiled
    def __call__(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if is_compiling():
            return
        try:
            self._tracker.close(module)
        except Exception as error:  # attribution may fail, the job's forward may not
            if raised_by_signal(error):
                raise


class Listener(Protocol):
    """Is told of module calls: of the beginning and the end of each, an exception's too. Must not raise."""

    def entered(self, name: str) -> None:
        """A module's forward begins."""

    def left(self) -> None:
        """The newest one that has not ended ended."""


class ModuleTracker:
    """Follows module calls through torch's global forward hooks: a few list operations for each call."""

    def __init__(self, names: ModuleNames, on_outermost_without_grad: Callable[[], None]) -> None:
        self.names = names
        self.intervals = Intervals()
        self.stack = CallStack()
        self._on_outermost_without_grad = on_outermost_without_grad
        self._handles: list[Any] = []
        self._enabled = True
        self._closing = _Closing(self)
        self._closing_key = -id(self)  # torch counts up from zero
        self._unclosed: dict[int, weakref.ref[nn.Module]] = {}
        self._hook_calls = 0
        self._hooks_ns = 0
        self.listener: Listener | None = None

    def install(self) -> None:
        """Register the two hooks."""
        register = nn.modules.module
        self._handles = [
            register.register_module_forward_pre_hook(self._before),
            register.register_module_forward_hook(self._after, always_call=True),
        ]

    def disable(self) -> None:
        """Make the hooks do nothing, in a forked child that inherited them."""
        self._enabled = False

    def remove(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()
        while self._unclosed:
            module = self._unclosed.popitem()[1]()
            if module is not None:
                module._forward_hooks.pop(self._closing_key, None)  # noqa: SLF001  its own call left it there

    def take_hooks_ns(self) -> int:
        """Nanoseconds the two hooks took since this was asked last, from every sixteenth call."""
        taken, self._hooks_ns = self._hooks_ns * SAMPLED, 0
        return taken

    @uncompiled
    def _before(self, module: nn.Module, _args: Any) -> None:
        if is_compiling() or not self._enabled:
            return
        self._hook_calls += 1
        began = 0 if self._hook_calls % SAMPLED else perf_counter_ns()
        try:
            stack = self.stack
            calls = stack.calls
            identity = id(module)
            if not calls:
                self._close_below(0)
                stack.outermost = weakref.ref(module)
                stack.grad = torch.is_grad_enabled() or in_checkpoint()
            name = self.names.by_identity(identity)
            if not name:
                if is_graph_module(module) and called_by_compiler(sys._getframe(1)):
                    return
                name = self._learn(module, calls)
            calls.append(identity)
            stack.after_child = False
            if self.listener is not None:
                self.listener.entered(name)
            self.intervals.note(name)
            if module._forward_hooks:  # noqa: SLF001  as torch's own call does
                self._close_last(module)
        except Exception as error:  # attribution may fail, the job's forward may not
            if raised_by_signal(error):
                raise
        if began:
            self._hooks_ns += perf_counter_ns() - began

    def _learn(self, module: nn.Module, calls: list[int]) -> str:
        if not calls and current_autograd_node() is not None:
            return ""  # made by a part of a module that is recomputed outside of any module call: nobody's known part
        outermost = self.stack.outermost() if self.stack.outermost is not None else None
        parent = self.names.by_identity(calls[-1]) if calls else ""
        return self.names.name(module, outermost if outermost is not None else module, parent)

    def _close_last(self, module: nn.Module) -> None:
        hooks: Any = module._forward_hooks  # noqa: SLF001  registering anew for each call would cost ten times as much
        hooks[self._closing_key] = self._closing
        hooks.move_to_end(self._closing_key)
        self._unclosed[id(module)] = weakref.ref(module)

    def close(self, module: nn.Module) -> None:
        """The module's own output hooks ran: from here on its caller is active."""
        module._forward_hooks.pop(self._closing_key, None)  # noqa: SLF001  put there by this call
        self._unclosed.pop(id(module), None)
        closing = self.stack.closing
        if self._enabled and (id(module), len(self.stack.calls)) in closing:
            while closing.pop()[0] != id(module):  # one whose own hook raised
                self._tell_left()
            self._left()

    @uncompiled
    def _after(self, module: nn.Module, _args: Any, output: Any) -> None:
        if is_compiling() or not self._enabled:
            return
        self._hook_calls += 1
        began = 0 if self._hook_calls % SAMPLED else perf_counter_ns()
        try:
            stack = self.stack
            calls = stack.calls
            identity = id(module)
            if identity not in calls:
                return
            while calls.pop() != identity:  # what an exception left behind
                self._tell_left()
            self._close_below(len(calls) + 1)
            stack.after_child = True
            if output is None or self._closing_key not in module._forward_hooks:  # noqa: SLF001  as in _before
                # No own output hook follows. After an exception there is no output, and the closing one never runs.
                self._left()
            else:
                stack.closing.append((identity, len(calls)))
        except Exception as error:  # attribution may fail, the job's forward may not
            if raised_by_signal(error):
                raise
        if began:
            self._hooks_ns += perf_counter_ns() - began

    def _close_below(self, depth: int) -> None:
        """Children of calls at this depth or deeper are over: an own output hook of theirs raised."""
        closing = self.stack.closing
        while closing and closing[-1][1] >= depth:
            closing.pop()
            self._tell_left()

    def _tell_left(self) -> None:
        if self.listener is not None:
            self.listener.left()

    def _left(self) -> None:
        self._tell_left()
        calls = self.stack.calls
        self.intervals.note(self.names.by_identity(calls[-1]) if calls else "")
        if not calls and not self.stack.grad:
            self._on_outermost_without_grad()
