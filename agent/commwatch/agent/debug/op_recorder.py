"""Records every op of this thread as a tree: the dispatch mode behind ``DebugMode`` and captures.

It extends torch's ``DebugMode`` because that is how torch tells a mode of DTensor redistributes, output placements,
Triton kernels and compiled regions. Nothing that torch's mode does per op runs here: an op costs one small record,
facts of its tensors are shared, and text is made when it is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from commwatch.agent.debug import op_facts
from commwatch.agent.debug import torch_private as private
from commwatch.agent.debug.calls import KernelCall, OpCall
from commwatch.agent.debug.module_entries import ModuleEntries
from commwatch.agent.debug.op_facts import OpFacts
from commwatch.agent.debug.recording import MAX_RECORDS, Recording
from commwatch.agent.debug.torch_private import stack_depth

__all__ = ["MAX_RECORDS", "OpRecorder"]

_DTENSOR = private.DTensor
_known = op_facts.KNOWN.get
_record_hooks, _log_hooks, _pre_log_hooks = private.RECORD_HOOKS, private.LOG_HOOKS, private.PRE_LOG_HOOKS


class _Entry(NamedTuple):
    """What one entry into the mode is to take back, and the ranges that were open when it began."""

    ranges: int
    counted: bool
    functions: bool
    modules: bool


class OpRecorder(Recording):
    """The recording as a mode: all that torch calls. It runs the job's ops, and nothing of its own fails into them.

    What an op, a hook of the user's or a signal handler raises passes unchanged.
    """

    def __init__(self, **flags: Any) -> None:
        self._entries: list[_Entry] = []
        self._deeper = _Deeper(self)
        super().__init__(**flags)
        self.module_tracker: ModuleEntries | None = None
        if self.record_nn_module:
            self.module_tracker = ModuleEntries(
                lambda: private.is_active(self),
                lambda name: self._module(name, "nn.Mod"),
                self._module_left,
                self._fail,
            )

    # Entering and leaving

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch is to wrap the dispatch function so that the compiler leaves it alone: done below for less."""
        return not private.CAN_SKIP_FRAMES

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is not traced for this mode, and compiles as if it were not there."""
        return True

    def __enter__(self) -> OpRecorder:
        counted = functions = modules = False
        try:
            private.count_active(1)
            counted = True
            if self.record_torchfunction:
                private.push_function_mode(self)
                functions = True
            if self.module_tracker is not None:
                self.module_tracker.install()
                modules = True
        except Exception as error:  # noqa: BLE001  the recording may fail, the job may not
            self._fail(error)
        finally:
            self._entries.append(_Entry(self._open_ranges, counted, functions, modules))
            TorchDispatchMode.__enter__(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry = self._entries.pop()
        try:
            TorchDispatchMode.__exit__(self, kind, error, trace)
        finally:
            if entry.modules and self.module_tracker is not None:
                self.module_tracker.remove()
            if entry.functions:
                private.pop_function_mode()
            if entry.counted:
                private.count_active(-1)
        left_open = self._open_ranges - entry.ranges
        if left_open > 0:  # their ends will not be seen
            self._open_ranges -= left_open
            self.call_depth -= left_open

    # Ops

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        keywords = kwargs if kwargs is not None else {}
        call = self._guarded(self._function, func, args, keywords)
        self.call_depth += 1
        try:
            result = func(*args, **keywords)
            if call is not None and self.record_output:
                self._guarded(self._output, call, result)
            return result
        finally:
            self.call_depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        call = None
        if self.listening:
            handler = None
            try:
                facts = _known(id(func)) or op_facts.learn(func)
                if facts.special:
                    handler = self._special(facts, args)
                if handler is not None:
                    pass
                elif types or stack_depth():
                    call = self._of_types(facts, types, args, kwargs)
                elif self.record_realtensor:
                    call = self._op(facts, "op", args, kwargs, self.call_depth + 1)
            except Exception as error:  # noqa: BLE001  the recorder may fail, the job's op may not
                self._fail(error)
            if handler is not None:
                return self._handled(handler, args, kwargs)
        if _DTENSOR in types:
            return NotImplemented
        if call is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if _pre_log_hooks or _record_hooks or _log_hooks:
            return self._with_hooks(call, func, types, args, kwargs or {})
        result = func(*args, **kwargs) if kwargs else func(*args)
        if self.record_output:
            try:
                call.output = self._take(result)
                if self._after is not None:
                    self._after(call, args, result)
            except Exception as error:  # noqa: BLE001  as above
                self._fail(error)
        return result

    def _special(self, facts: OpFacts, args: tuple[Any, ...]) -> Any:
        """Ops that tell of ranges, annotations and subgraphs. Returns what is to run in the op's place, or None."""
        if facts.special == op_facts.RANGE:
            self._range(facts.op, args)
        elif facts.special == op_facts.ANNOTATION:
            self._annotation(args[0])
            return _nothing
        elif facts.special == op_facts.SUBGRAPH:
            return private.subgraph_handler(facts.op)
        return None

    def _handled(self, handler: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """torch's way to run the op; it counts depth up and, behind an exception, not down again."""
        depth = self.call_depth
        try:
            return handler(self, *args, **(kwargs or {}))
        finally:
            self.call_depth = depth

    def _with_hooks(self, call: OpCall, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Hooks are the user's: what they raise is theirs."""
        private.run_pre_hooks(call, func, types, args, kwargs)
        result = func(*args, **kwargs)
        if self.record_output:
            self._guarded(self._output, call, result)
        private.run_hooks(call, func, types, args, kwargs, result)
        return result

    # What DTensor tells

    def record_redistribute_calls(
        self,
        arg: Any,
        src_placement: Any,
        dst_placement: Any,
        transform_info_str: str | None = None,
        is_explicit: bool = False,
    ) -> Any:
        """DTensor decides on a redistribute (``arg`` is the argument's index), or does one (``arg`` is the tensor)."""
        other = None
        try:
            other = private.listener_above(self)
            if self.listening:
                self._redistribute(arg, src_placement, dst_placement, transform_info_str, explicit=is_explicit)
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)
        if other is None:
            return self._deeper
        theirs = other.record_redistribute_calls(
            arg, src_placement, dst_placement, transform_info_str, is_explicit=is_explicit
        )
        return _deeper_with(self, theirs)

    def record_output_placements(self, output_spec: Any) -> None:
        """DTensor chose the placements of an op's output."""
        if self.record_output:
            self._guarded(self._output_placements, output_spec)
        other = None
        try:
            other = private.listener_above(self)
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)
        if other is not None:
            other.record_output_placements(output_spec)

    # What inductor and the interpreter of compiled regions tell

    def record_triton_kernel(self, kernel_name: str, kwargs: dict[str, Any]) -> Any:
        """Inductor launches a kernel. Returns the record, which inductor has hash the outputs afterwards.

        As torch's own, the record holds the tensors until the kernel has run; hash functions are the user's.
        """
        call = KernelCall(kernel_name, kwargs, self.call_depth + 1)
        call.stringify_args(self.record_tensor_attributes)
        self._guarded(self._kernel, call, kwargs)
        return call

    def _record_call(self, call: Any) -> None:
        """torch made a record itself: of the higher-order op ``invoke_subgraph``."""
        self._guarded(self._theirs, call)

    def _record_call_output(self, call: Any, output: Any) -> None:
        """Its outputs."""
        if self.record_output:
            self._guarded(self._output_of_theirs, call, output)

    def _handle_annotate(self, tag: Any) -> None:
        self._guarded(self._annotation, tag)

    def _enter_nn_module_call(self, fqn: str, header: str) -> None:
        self._guarded(self._module, fqn, header)

    def _exit_nn_module_call(self) -> None:
        self._guarded(self._module_left)

    def _handle_fx_nn_module_stack(self, base_stack: Any, nn_module_stack: Any, fwd_nn_module_stack: Any) -> None:
        """The module stack of the graph's next node, forward or backward."""
        self._guarded(super()._handle_fx_nn_module_stack, base_stack, nn_module_stack, fwd_nn_module_stack)


def _nothing(*_args: Any) -> None:
    """What an annotation does."""


class _Deeper:
    """What runs inside is deeper by one."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: OpRecorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder.call_depth += 1

    def __exit__(self, *error: Any) -> None:
        self._recorder.call_depth -= 1


@contextlib.contextmanager
def _deeper_with(recorder: OpRecorder, theirs: Any) -> Iterator[None]:
    """As ``_Deeper``, in a recorder and in somebody else's mode."""
    recorder.call_depth += 1
    try:
        with theirs:
            yield
    finally:
        recorder.call_depth -= 1


private.skip_in_compiler(OpRecorder.__torch_dispatch__)
