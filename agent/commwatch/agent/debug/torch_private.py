"""Every private torch API the debug modes use, in one place, with a probe.

torch's DTensor, inductor and higher-order ops call into "the active DebugMode", which they find by ``isinstance``. So
the op recorder extends torch's class: that is the only door through which they tell of redistributes, output
placements, Triton kernels and compiled regions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

try:
    from torch.utils import _debug_mode as _module
except ImportError:  # torch 2.9 has no such mode
    _module = None  # type: ignore[assignment]

_calls: Any = getattr(_module, "_calls", _module)
_mode: Any = getattr(_module, "_mode", _module)
_utils: Any = getattr(_module, "_utils", _module)

_OP_RECORDS = ("_OpCall", "_RedistributeCall", "_OutputPlacementCall", "_TritonKernelCall", "_AnnotateCall")
_HOOKS = ("_DISPATCH_RECORD_HOOKS", "_DISPATCH_LOG_HOOKS", "_DISPATCH_PRE_LOG_HOOKS")


def missing() -> list[str]:
    """Names of the APIs this torch lacks; empty when op-level recording can work."""
    if _module is None:
        return ["torch.utils._debug_mode"]
    absent = [f"torch.utils._debug_mode.{name}" for name in _OP_RECORDS if not hasattr(_calls, name)]
    absent += [f"torch.utils._debug_mode.{name}" for name in _HOOKS if not hasattr(_utils, name)]
    if not hasattr(_mode, "_ACTIVE_DEBUG_MODE_COUNT"):
        absent.append("torch.utils._debug_mode._ACTIVE_DEBUG_MODE_COUNT")
    absent += [
        f"torch._C.{name}"
        for name in ("_len_torch_dispatch_stack", "_get_dispatch_stack_at", "_push_on_torch_function_stack")
        if not hasattr(torch._C, name)
    ]
    return absent


TorchDebugMode: type[TorchDispatchMode] = getattr(_mode, "DebugMode", TorchDispatchMode)
"""torch's own mode, which ours extends."""

OpCall: Any = getattr(_calls, "_OpCall", object)
RedistributeCall: Any = getattr(_calls, "_RedistributeCall", object)
OutputPlacementCall: Any = getattr(_calls, "_OutputPlacementCall", object)
TritonKernelCall: Any = getattr(_calls, "_TritonKernelCall", object)
AnnotateCall: Any = getattr(_calls, "_AnnotateCall", object)

RECORD_HOOKS: list[Any] = getattr(_utils, "_DISPATCH_RECORD_HOOKS", [])
LOG_HOOKS: list[Any] = getattr(_utils, "_DISPATCH_LOG_HOOKS", [])
PRE_LOG_HOOKS: list[Any] = getattr(_utils, "_DISPATCH_PRE_LOG_HOOKS", [])
run_pre_hooks: Callable[..., None] = getattr(_utils, "_run_dispatch_pre_log_hooks", lambda *_: None)
run_hooks: Callable[..., None] = getattr(_utils, "_run_dispatch_hooks", lambda *_: None)

DTensor: Any = torch.distributed.tensor.DTensor
FAKE_TENSOR: Any = FakeTensor
FAKE_MODE: Any = FakeTensorMode

stack_depth: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
stack_at: Callable[[int], Any] = getattr(torch._C, "_get_dispatch_stack_at", lambda _index: None)
push_function_mode: Callable[[Any], None] = getattr(torch._C, "_push_on_torch_function_stack", lambda _mode: None)
pop_function_mode: Callable[[], Any] = getattr(torch._C, "_pop_torch_function_stack", lambda: None)

no_functions: Callable[[], Any] = torch._C.DisableTorchFunction
"""A context in which no torch function mode and no subclass's ``__torch_function__`` runs on this thread."""

ENTER_RANGE: Any = torch.ops.profiler._record_function_enter_new.default
EXIT_RANGE: Any = torch.ops.profiler._record_function_exit._RecordFunction
DEVICE_QUERY: Any = torch.ops.prim.device.default
Operator: Any = torch._ops.OpOverload
HigherOrder: Any = torch._ops.HigherOrderOperator


def _benchmark_flag() -> Callable[[], bool]:
    flags = vars(_utils) if _utils is not None else {}
    get = flags.get
    return lambda: get("_IN_INDUCTOR_BENCHMARK", False)


in_benchmark = _benchmark_flag()
"""Whether inductor times kernels right now: these calls are no part of the program."""

_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
CAN_SKIP_FRAMES = all(
    hasattr(_eval_frame, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
)
"""Whether a function can be kept from the compiler by a mark on its code, without a wrapper and without loading it."""


def skip_in_compiler(function: Any) -> None:
    """Keep the compiler away from a function and what it calls, as ``torch._disable_dynamo`` does with a wrapper."""
    if CAN_SKIP_FRAMES:
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))


def in_compiled_module() -> bool:
    """Whether an ``OptimizedModule`` runs, whose hooks fire for code that is compiled as a whole. Imports nothing."""
    inside = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_is_in_optimized_module", None)
    return inside is not None and bool(inside())


def count_active(change: int) -> None:
    """Tell torch that one mode more (1) or less (-1) listens: it looks for modes only when there are any."""
    _mode._ACTIVE_DEBUG_MODE_COUNT += change


def prepare_annotations() -> None:
    """Make ``DebugMode._annotate`` pass through the compiler, in a program that compiles.

    torch's way to do so loads inductor, which takes a second.
    """
    if "torch._dynamo.convert_frame" in sys.modules:
        ensure = getattr(_mode, "_ensure_annotate_decorated", None)
        if ensure is not None:
            ensure()


ANNOTATE: Any = getattr(getattr(torch.ops, "debug_mode_ops", None), "annotate", None)
"""The op behind ``DebugMode._annotate``; its overload is ``default``."""


PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors whose ops run no Python."""


def hash_function(kind: str) -> Callable[[torch.Tensor], Any]:
    """torch's hash of a tensor as a number: ``norm`` or ``hash_tensor``. Raises AttributeError when it has none."""
    function = _utils.norm_hash_fn if kind == "norm" else _utils.hash_tensor_fn
    return lambda tensor: function(tensor, use_scalar=True)


def is_complete(work: Any) -> bool:
    """Whether a boxed Work is complete, as far as it says; waits for nothing."""
    import torch.distributed as dist

    try:
        return bool(dist.Work.unbox(work).is_completed())
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False


def is_capturing_graph() -> bool:
    """Whether the current stream records a CUDA graph: it may not be waited for."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory a tensor is a view of."""
    return int(tensor.untyped_storage()._cdata)


def listener_above(mine: Any) -> Any:
    """The next DebugMode above ``mine`` on this thread's stack, or None: torch tells the lowest one alone."""
    if _mode._ACTIVE_DEBUG_MODE_COUNT < 2:
        return None
    found = False
    for index in range(stack_depth()):
        mode = stack_at(index)
        if mode is mine:
            found = True
        elif found and isinstance(mode, TorchDebugMode):
            return mode
    return None


def is_active(mode: Any) -> bool:
    """Whether ``mode`` is on this thread's stack."""
    return any(stack_at(index) is mode for index in range(stack_depth()))


def on_top() -> Any:
    """The mode that stands on top of this thread's stack, or None."""
    depth = stack_depth()
    return stack_at(depth - 1) if depth else None


def program_modes() -> list[Any]:
    """Modes on this thread's stack that are not torch's own (those have places of their own beneath it)."""
    modes = [stack_at(index) for index in range(stack_depth())]
    return [mode for mode in modes if getattr(mode, "_mode_key", None) is None]


def subgraph_handler(op: Any) -> Any:
    """How torch's own DebugMode runs the higher-order op ``invoke_subgraph``; None for any other op.

    Handlers of other higher-order ops hand the call back to the mode, which is what happens without one.
    """
    return op.python_key_table.get(TorchDebugMode) if op._name == "invoke_subgraph" else None


def schema(op: Any) -> Any:
    """Schema of an OpOverload."""
    return op._schema


def spec_of(tensor: Any) -> Any:
    """The DTensorSpec of a DTensor."""
    return tensor._spec


_Spec: Any = torch.distributed.tensor._dtensor_spec.DTensorSpec
_Placement: Any = torch.distributed.tensor.placement_types.Placement


_Placements: Any = torch.distributed.tensor.placement_types
PLACEMENTS = (_Placements.Shard, _Placements.Replicate, _Placements.Partial)
"""Types of placements that programs use; they never change."""


def is_spec(value: Any) -> bool:
    """Whether an argument is a DTensorSpec."""
    return isinstance(value, _Spec)


def is_placement(value: Any) -> bool:
    """Whether an argument is a Placement, which never changes."""
    return isinstance(value, _Placement)


def placements_text(spec: Any) -> str:
    """Placements in mesh order, in torch's short form: ``S(0)R``."""
    text: str = _Spec.format_shard_order_str(spec.placements, getattr(spec, "shard_order", None))
    return text


def process_group_of(value: Any) -> Any:
    """The ProcessGroup behind an argument of a c10d op: boxed, or a name. None when it is neither."""
    import torch.distributed as dist

    try:
        if isinstance(value, str):
            resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group", None)
            return resolve(value)
        return dist.ProcessGroup.unbox(value)
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return None


def is_deferred(tensor: Any) -> bool:
    """Whether a tensor is an AsyncCollectiveTensor."""
    return type(tensor).__name__ == "AsyncCollectiveTensor"


_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_OP_CALLS = (
    torch._ops.OpOverload.__call__.__code__,
    torch._ops.OpOverload.redispatch.__code__,
    torch._ops.OpOverloadPacket.__call__.__code__,
)


def missing_for_counts() -> list[str]:
    """Names of the APIs this torch lacks that attributing ops to modules needs; empty when it can work."""
    names = {"_C": ("_current_graph_task_id",), "_guards": ("detect_fake_mode", "TracingContext")}
    return [
        f"torch.{module}.{name}"
        for module, found in names.items()
        for name in found
        if not hasattr(getattr(torch, module, None), name)
    ]


def backward_number() -> int:
    """Number of the backward this thread runs; -1 outside backward."""
    return _graph_task()


def packet_of(op: Any) -> Any:
    """The OpOverloadPacket of an OpOverload."""
    return op._overloadpacket


def runs_an_op(code: Any) -> bool:
    """Whether a frame of this code calls the op that is its ``self``."""
    return any(code is known for known in _OP_CALLS)


def name_of(op: Any) -> str:
    """``namespace::name`` of an OpOverload or a packet; empty for anything else."""
    name = getattr(op, "_qualified_op_name", None) or getattr(op, "_name", "")
    return str(name).partition(".")[0]


def computes_fakes(args: Any, types: Any) -> bool:
    """Whether an op with these arguments computes on fake tensors, as tracing and sharding propagation do.

    ``types`` are the subclasses among them; the mode that asks is not on the stack.
    """
    if not types and not stack_depth() and torch._guards.TracingContext.try_get() is None:
        return False
    try:
        return torch._guards.detect_fake_mode(args) is not None
    except AssertionError:  # several fake modes at once
        return True
