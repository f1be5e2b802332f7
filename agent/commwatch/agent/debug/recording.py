"""The records of a recording and how they are made; when torch calls is in ``op_recorder``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commwatch.agent.debug import torch_private as private
from commwatch.agent.debug.calls import AnnotateCall, KernelCall, OpCall, OutputPlacementCall, RedistributeCall, Stacks
from commwatch.agent.debug.group_arguments import GroupArguments
from commwatch.agent.debug.op_facts import OpFacts
from commwatch.agent.debug.snapshot import Snapshots
from commwatch.agent.debug.stacks import ForwardNotes, LazyStack
from commwatch.agent.debug.torch_private import in_benchmark, stack_depth
from commwatch.agent.recorder.codes import raised_by_signal
from commwatch.agent.recorder.torch_private import current_autograd_node

MAX_RECORDS = 1_000_000
"""Records kept by default; later ones are counted in ``dropped_records``."""

_DTENSOR = private.DTensor
_QUIET_RANGES = ("CachingAutotuner.", "InductorBenchmarker.", "compile_fx.<locals>.")


class Recording(private.TorchDebugMode):  # type: ignore[valid-type,misc]  # the class depends on the torch installed
    """A tree of records in ``operators``, in order, each with its ``call_depth``.

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
        self._snapshots = Snapshots(tuple(self.record_tensor_attributes), numbered=record_ids)
        self._take: Callable[[Any], Any] = self._snapshots.take
        self._after: Callable[[OpCall, tuple[Any, ...], Any], None] | None = None
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

    # Ops

    def _of_types(self, facts: OpFacts, types: Any, args: tuple[Any, ...], kwargs: Any) -> OpCall | None:
        """An op that may be none on plain tensors."""
        if _DTENSOR in types:
            return self._op(facts, "dtensor_op", args, kwargs, self.call_depth)
        kind = self._kind(facts, types)
        return self._op(facts, kind, args, kwargs, self.call_depth + 1) if kind is not None else None

    def _kind(self, facts: OpFacts, types: Any) -> str | None:
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

    def _op(self, facts: OpFacts, kind: str, args: tuple[Any, ...], kwargs: Any, depth: int) -> OpCall | None:
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

    def _function(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> OpCall | None:
        return self._op(OpFacts(func), "torch_function", args, kwargs, self.call_depth)

    def _add(self, call: OpCall, args: tuple[Any, ...], kwargs: Any) -> None:
        """What costs more and must be asked for."""
        if self.store_original_args:
            call.original = (args, kwargs or {})
        if self.record_stack_trace:
            self._trace(call, args)
        if self.fx_stack_trace:
            call.stack = call.forward_stack = self.fx_stack_trace

    def _output(self, call: OpCall, result: Any) -> None:
        call.output = self._take(result)

    # Everything else

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

    def _output_placements(self, output_spec: Any) -> None:
        self._keep(OutputPlacementCall(str(self._take(output_spec)), self.call_depth + 1))

    def _keep(self, call: Any) -> None:
        if in_benchmark():
            return
        if len(self.operators) >= self.max_records:
            self.dropped_records += 1
            return
        if self.record_stack_trace and not isinstance(call, (OutputPlacementCall, KernelCall)):
            self._trace(call, ())
        if self.fx_stack_trace and isinstance(call, Stacks):
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

    def _annotation(self, tag: Any) -> None:
        self._keep(AnnotateCall(tag, "annotate", "annotation", self.call_depth))

    def _module(self, name: str, header: str) -> None:
        self._keep(AnnotateCall(name, header, "module", self.call_depth + 1))
        self.current_nn_module_stack.append(name)
        self.call_depth += 1

    def _module_left(self) -> None:
        self.call_depth -= 1
        self.current_nn_module_stack.pop()

    def _theirs(self, call: Any) -> None:
        """An op that torch records itself: in its record's place stands one of ours."""
        call.ours = self._op(OpFacts(call.op), "op", call.args, call.kwargs, call.call_depth)

    def _output_of_theirs(self, call: Any, output: Any) -> None:
        if call.ours is not None:
            self._output(call.ours, output)

    def _kernel(self, call: KernelCall, kwargs: dict[str, Any]) -> None:
        call.keywords = {name: self._take(value) for name, value in kwargs.items()}
        self._keep(call)

    # Failure

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do it unless the recording failed before; a failure ends the recording, not the job. None then."""
        if self.listening:
            try:
                return work(*args)
            except Exception as error:  # noqa: BLE001  the recorder may fail, the job may not
                self._fail(error)
        return None

    def _fail(self, error: Exception) -> None:
        if raised_by_signal(error):
            raise error
        self.failure = error
        self.listening = False
