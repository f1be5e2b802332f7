"""Entries and exits of nn.Module calls, with the names torch's own tracker gives: the class, then the path."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from commwatch.agent.debug.torch_private import in_compiled_module


class ModuleEntries:
    """Calls ``on_enter(name)`` before a module's forward and ``on_exit()`` behind it, also when it raised.

    ``on_error`` is told what went wrong; it raises what belongs to the program.
    """

    def __init__(
        self,
        listens: Callable[[], bool],
        on_enter: Callable[[str], None],
        on_exit: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._listens = listens
        self._on_enter = on_enter
        self._on_exit = on_exit
        self._on_error = on_error
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._walked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._open: list[int] = []
        self._installed = 0
        self._handles: list[Any] = []

    def install(self) -> None:
        """Register the two global hooks; once, however often it is asked for."""
        self._installed += 1
        if self._installed == 1:
            register = nn.modules.module
            self._handles = [
                register.register_module_forward_pre_hook(self._before),
                register.register_module_forward_hook(self._after, always_call=True),
            ]

    def remove(self) -> None:
        """Take the hooks away when nobody needs them any more."""
        self._installed -= 1
        if self._installed:
            return
        while self._handles:
            self._handles.pop().remove()
        self._open.clear()

    def name(self, module: nn.Module) -> str:
        """Class name of the first module met, then the path below it: ``MLP.net1``."""
        name = self._names.get(module)
        if name is None:
            name = self._names[module] = type(module).__name__
        if module not in self._walked:
            self._walked.add(module)
            for child_name, child in module.named_children():
                self._names[child] = f"{name}.{child_name}"
                self.name(child)
        return name

    def _before(self, module: nn.Module, _args: Any) -> None:
        if is_compiling():
            return
        try:
            if self._listens() and not in_compiled_module():
                self._on_enter(self.name(module))
                self._open.append(id(module))
        except Exception as error:  # noqa: BLE001  an entry may be missing, the job's forward may not
            self._on_error(error)

    def _after(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if is_compiling():
            return
        try:
            identity = id(module)
            if identity not in self._open or not self._listens():
                return
            while self._open:  # an exception may have left inner entries open
                ended = self._open.pop()
                self._on_exit()
                if ended == identity:
                    break
        except Exception as error:  # noqa: BLE001  as above
            self._on_error(error)
