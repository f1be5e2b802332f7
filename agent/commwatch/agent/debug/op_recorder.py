"""Records every op of this thread as a tree: the dispatch mode behind ``DebugMode`` and captures.

It extends torch's ``DebugMode`` because that is how torch tells a mode of DTensor redistributes, output placements,
Triton kernels and compiled regions. Nothing that torch's mode does per op runs here: an op costs one small record,
facts of its tensors are shared, and text is made when it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commwatch.agent.debug import torch_private as private
from commwatch.agent.debug.calls import AnnotateCall, OpCall, OutputPlacementCall, RedistributeCall
from commwatch.agent.debug.group_arguments import GroupArguments
from commwatch.agent.debug.module_entries import ModuleEntries
from commwatch.agent.debug.snapshot import Snapshots
from commwatch.agent.debug.stacks import ForwardNotes, LazyStack
from commwatch.agent.debug.torch_private import in_benchmark, stack_depth
from commwatch.agent.recorder.codes import raised_by_signal
from commwatch.agent.recorder.torch_private import current_autograd_node

_T = TypeVar("_T")

MAX_RECORDS = 1_000_000
"""Records kept by default; later ones are counted in ``dropped_records``."""

_DTENSOR = private.DTensor
_record_hooks, _log_hooks, _pre_log_hooks = private.RECORD_HOOKS, private.LOG_HOOKS, private.PRE_LOG_HOOKS
_QUIET_RANGES = ("CachingAutotuner.", "InductorBenchmarker.", "compile_fx.<locals>.")


class _OpFacts:
    """What is known of an op: whether it is recorded, where its process group stands, and how it is handled."""

    __slots__ = ("group", "op", "recorded", "special")

    def __init__(self, op: Any) -> None:
        self.op = op
        self.group: tuple[int, ...] = ()
        self.special = ""
        name = str(op)
        if isinstance(op, private.Operator):
            name = op.__qualname__
            self.group = GroupArguments.positions(op)
            if op is private.ENTER_RANGE or op is private.EXIT_RANGE:
                self.special = "range"
            elif private.ANNOTATE is not None and op is private.ANNOTATE.default:
                self.special = "annotation"
            elif op is private.DEVICE_QUERY:
                self.special = "device"
        elif isinstance(op, private.HigherOrder) and private.subgraph_handler(op) is not None:
            self.special = "subgraph"
        self.recorded = not name.startswith("profiler::_record_function")


class OpRecorder(private.TorchDebugMode):  # type: ignore[valid-type,misc]  # the class depends on the torch installed
    """A dispatch mode that keeps a tree of records in ``operators``, in order, each with its ``call_depth``.

    The flags are those of torch's ``DebugMode``. ``max_records`` bounds memory. No tensor is kept alive, unless
    ``store_original_args`` asks for it. An error of the recorder's own ends the recording and stands in ``failure``;
    with ``listening`` off the mode passes everything through.
    """

    def __init__(
        self,
        *,
        record_torchfunction: bool = False,
        record_faketensor: bool = False,
        record_realtensor: bool = True,
        record_tensor_attributes: list[str] | None = None,
        record_nn_module: bool = False,
        store_original_args: bool = False,
        record_stack_trace: bool = False,
        record_output: bool = True,
        record_ids: bool = False,
        record_profiler_context: bool = True,
        record_localtensor: bool = True,
        run_compile_with_interpreter: bool = False,
        max_records: int = MAX_RECORDS,
        groups: GroupArguments | None = None,
    ) -> None:
        TorchDispatchMode.__init__(self)
        self.supports_higher_order_operators = True
        self.record_torchfunction = record_torchfunction
        self.record_faketensor = record_faketensor
        self.record_realtensor = record_realtensor
        self.record_localtensor = record_localtensor
        self.record_tensor_attributes = record_tensor_attributes or []
        self.record_nn_module = record_nn_module
        self.store_original_args = store_original_args
        self.record_stack_trace = record_stack_trace
        self.record_output = record_output
        self.record_ids = record_ids
        self.record_profiler_context = record_profiler_context
        self.run_compile_with_interpreter = run_compile_with_interpreter
        self.max_records = max_records
        self._exact = store_original_args or record_stack_trace or run_compile_with_interpreter
        self.module_tracker: ModuleEntries | None = None
        if record_nn_module:
            self.module_tracker = ModuleEntries(
                lambda: private.is_active(self), self._enter_module, self._exit_nn_module_call
            )
        self._snapshots = Snapshots(tuple(self.record_tensor_attributes), numbered=record_ids)
        self._take: Callable[[Any], Any] = self._snapshots.take
        self._ops: dict[int, _OpFacts] = {}
        self._groups = groups or GroupArguments()
        self.reset()

    def reset(self) -> None:
        """Forget every record; tensor ids begin again."""
        self.operators: list[Any] = []
        self.dropped_records = 0
        self.failure: Exception | None = None
        self.listening = True
        self.call_depth = 0
        self._open_ranges = 0
        self.ignored_record_functions = 0
        self.current_nn_module_stack: list[str] = []
        self.fx_stack_trace: str | None = None
        self._tensor_memo = None
        self._forward_stacks: ForwardNotes[LazyStack] = ForwardNotes()
        self._snapshots.forget()

    # What torch calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch is to wrap the dispatch function so that the compiler leaves it alone: done below for less."""
        return not private.CAN_SKIP_FRAMES

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is not traced for this mode, and compiles as if it were not there."""
        return True

    def __enter__(self) -> OpRecorder:
        private.count_active(1)
        if self.record_torchfunction:
            private.push_function_mode(self)
        TorchDispatchMode.__enter__(self)
        if self.module_tracker is not None:
            self.module_tracker.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        private.count_active(-1)
        TorchDispatchMode.__exit__(self, kind, error, trace)
        if self.module_tracker is not None:
            self.module_tracker.remove()
        if self.record_torchfunction:
            private.pop_function_mode()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        keywords = kwargs if kwargs is not None else {}
        call = self._guarded(lambda: self._op(_OpFacts(func), "torch_function", args, keywords, self.call_depth))
        self.call_depth += 1
        try:
            result = func(*args, **keywords)
            if call is not None and self.record_output:
                self._output(call, result)
            return result
        finally:
            self.call_depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        call = None
        if self.listening:
            try:
                facts = self._ops.get(id(func))
                if facts is None:
                    facts = self._ops[id(func)] = _OpFacts(func)
                if facts.special:
                    handled = self._special(facts, args)
                    if handled is not None:
                        return handled(self, *args, **(kwargs or {}))
                if types or stack_depth():
                    call = self._of_types(facts, types, args, kwargs)
                elif self.record_realtensor:
                    call = self._op(facts, "op", args, kwargs, self.call_depth + 1)
            except Exception as error:  # noqa: BLE001  the recorder may fail, the job's op may not
                self._fail(error)
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
            except Exception as error:  # noqa: BLE001  as above
                self._fail(error)
        return result

    def record_redistribute_calls(
        self,
        arg: Any,
        src_placement: Any,
        dst_placement: Any,
        transform_info_str: str | None = None,
        is_explicit: bool = False,
    ) -> _Redistribute:
        """DTensor decides on a redistribute (``arg`` is the argument's index), or does one (``arg`` is the tensor)."""
        if self.listening:
            try:
                self._redistribute(arg, src_placement, dst_placement, transform_info_str, explicit=is_explicit)
            except Exception as error:  # noqa: BLE001  as above
                self._fail(error)
        other = private.other_listener(self)
        theirs = None
        if other is not None:
            theirs = other.record_redistribute_calls(
                arg, src_placement, dst_placement, transform_info_str, is_explicit=is_explicit
            )
        return _Redistribute(self, theirs)

    def record_output_placements(self, output_spec: Any) -> None:
        """DTensor chose the placements of an op's output."""

        def record() -> None:
            self._keep(OutputPlacementCall(str(self._take(output_spec)), self.call_depth + 1))

        if self.record_output:
            self._guarded(record)
        other = private.other_listener(self)
        if other is not None:
            other.record_output_placements(output_spec)

    # Records

    def _redistribute(self, arg: Any, src: Any, dst: Any, trace: str | None, *, explicit: bool) -> None:
        take = self._take
        if not self.record_torchfunction:
            value = arg if type(arg) is int else take(arg)
            call = RedistributeCall(value, take(src), take(dst), trace, self.call_depth + 1, explicit=explicit)
        else:
            with private.no_functions():  # what is read here is no function of the program
                value = arg if type(arg) is int else take(arg)
                call = RedistributeCall(value, take(src), take(dst), trace, self.call_depth + 1, explicit=explicit)
        self._keep(call)

    def _of_types(self, facts: _OpFacts, types: Any, args: tuple[Any, ...], kwargs: Any) -> OpCall | None:
        """An op that may be none on plain tensors."""
        if _DTENSOR in types:
            return self._op(facts, "dtensor_op", args, kwargs, self.call_depth)
        kind = self._kind(facts, types)
        return self._op(facts, kind, args, kwargs, self.call_depth + 1) if kind is not None else None

    def _kind(self, facts: _OpFacts, types: Any) -> str | None:
        """The kind of an op that is none on DTensors; None when it is not recorded."""
        depth = stack_depth()
        if private.FAKE_TENSOR in types or (depth and isinstance(private.stack_at(depth - 1), private.FAKE_MODE)):
            return "fake_op" if self.record_faketensor and facts.special != "device" else None
        names = [type_.__name__ for type_ in types]
        if "LocalTensor" in names:
            return "local_tensor_op" if self.record_localtensor else None
        if "AsyncCollectiveTensor" in names:
            return "async_op" if self.record_realtensor else None
        return "op" if self.record_realtensor and not names else None

    def _op(self, facts: _OpFacts, kind: str, args: tuple[Any, ...], kwargs: Any, depth: int) -> OpCall | None:
        operators = self.operators
        if not facts.recorded or len(operators) >= self.max_records:
            self.dropped_records += facts.recorded
            return None
        take = self._take
        values = tuple([take(value) for value in args])
        if facts.group:
            values = self._groups.replaced(values, args, facts.group)
        keywords = {name: take(value) for name, value in kwargs.items()} if kwargs else None
        call = OpCall(facts.op, kind, values, keywords, depth)
        if self._exact:
            self._add(call, args, kwargs)
        if not in_benchmark():
            operators.append(call)
            return call
        return None

    def _add(self, call: OpCall, args: tuple[Any, ...], kwargs: Any) -> None:
        """What costs more and must be asked for."""
        if self.store_original_args:
            call.original = (args, kwargs or {})
        if self.record_stack_trace:
            self._trace(call, args)
        if self.fx_stack_trace:
            call.stack = call.forward_stack = self.fx_stack_trace

    def _keep(self, call: Any) -> None:
        if in_benchmark():
            return
        if len(self.operators) >= self.max_records:
            self.dropped_records += 1
            return
        if self.record_stack_trace and not isinstance(call, OutputPlacementCall):
            self._trace(call, ())
        if self.fx_stack_trace:
            call.stack_trace = call.fwd_stack_trace = self.fx_stack_trace
        self.operators.append(call)

    def _trace(self, call: Any, args: tuple[Any, ...]) -> None:
        stack = LazyStack()
        call.stack = stack
        if current_autograd_node() is None:
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            self._forward_stacks.note(stack, [value for value in tensors if value.requires_grad and value.is_leaf])
        else:
            call.forward_stack = self._forward_stacks.current()

    def _output(self, call: OpCall, result: Any) -> None:
        def take() -> None:
            call.output = self._take(result)

        self._guarded(take)

    def _with_hooks(self, call: OpCall, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Hooks are the user's: what they raise is theirs."""
        private.run_pre_hooks(call, func, types, args, kwargs)
        result = func(*args, **kwargs)
        if self.record_output:
            self._output(call, result)
        private.run_hooks(call, func, types, args, kwargs, result)
        return result

    # Failure

    def _guarded(self, work: Callable[[], _T]) -> _T | None:
        """Do it unless the recording failed before; a failure ends the recording, not the job."""
        if self.listening:
            try:
                return work()
            except Exception as error:  # noqa: BLE001  the recorder may fail, the job may not
                self._fail(error)
        return None

    def _fail(self, error: Exception) -> None:
        if raised_by_signal(error):
            raise error
        self.failure = error
        self.listening = False

    # Ranges, annotations and modules

    def _special(self, facts: _OpFacts, args: tuple[Any, ...]) -> Any:
        """Ops that tell of ranges, annotations and subgraphs. Returns what is to run in the op's place, or None."""
        if facts.special == "range":
            self._range(facts.op, args)
        elif facts.special == "annotation":
            self._handle_annotate(args[0])
            return _nothing
        elif facts.special == "subgraph":
            return private.subgraph_handler(facts.op)
        return None

    def _range(self, func: Any, args: tuple[Any, ...]) -> None:
        if not self.record_profiler_context:
            return
        if func is private.EXIT_RANGE:
            if self.ignored_record_functions:
                self.ignored_record_functions -= 1
            elif self._open_ranges:  # one that was entered before the mode leaves no depth behind
                self._open_ranges -= 1
                self.call_depth -= 1
        elif str(args[0]).startswith(_QUIET_RANGES):
            self.ignored_record_functions += 1
        else:
            self._keep(AnnotateCall(args[0], "record function", "record_function", self.call_depth))
            self._open_ranges += 1
            self.call_depth += 1

    def _handle_annotate(self, tag: Any) -> None:
        self._keep(AnnotateCall(tag, "annotate", "annotation", self.call_depth))

    def _enter_module(self, name: str) -> None:
        self._enter_nn_module_call(name, "nn.Mod")

    def _enter_nn_module_call(self, fqn: str, header: str) -> None:
        self._keep(AnnotateCall(fqn, header, "module", self.call_depth + 1))
        self.current_nn_module_stack.append(fqn)
        self.call_depth += 1


def _nothing(*_args: Any) -> None:
    """What an annotation does."""


class _Redistribute:
    """What runs inside is deeper by one."""

    __slots__ = ("_recorder", "_theirs")

    def __init__(self, recorder: OpRecorder, theirs: Any) -> None:
        self._recorder = recorder
        self._theirs = theirs

    def __enter__(self) -> None:
        self._recorder.call_depth += 1
        if self._theirs is not None:
            self._theirs.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._recorder.call_depth -= 1
        if self._theirs is not None:
            self._theirs.__exit__(*error)


private.skip_in_compiler(OpRecorder.__torch_dispatch__)
