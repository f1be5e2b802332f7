"""Every private torch API the recorder uses, in one place, with a probe.

``PROBES`` says of each whether this torch has it; ``features.py`` says what goes without it, and
``docs/compatibility.md`` which releases were tried.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

MINIMUM_TORCH = "2.9"

KEY = "BackendSelect"
"""The dispatch key the recorder takes: behind every mode and wrapper, before every backend."""

_keyset_after: Any = getattr(torch._C, "_dispatch_keyset_full_after", None)
KEYS_BEHIND: Any = _keyset_after(torch._C.DispatchKey.BackendSelect) if _keyset_after else None
META: Any = torch._C.DispatchKey.Meta


def _loaded(module: str, name: str) -> bool:
    """Whether a module has a name; True while it is not loaded, which may cost seconds."""
    found = sys.modules.get(module)
    return found is None or hasattr(found, name)


def _c10d(*path: str) -> bool:
    found: Any = dist if dist.is_available() else None
    for name in path:
        found = getattr(found, name, None)
    return found is not None


PROBES: dict[str, Callable[[], bool]] = {
    "torch.distributed": dist.is_available,
    "torch._C._dispatch_keyset_full_after": lambda: KEYS_BEHIND is not None,
    f"OperatorHandle.redispatch_boxed (torch >= {MINIMUM_TORCH})": lambda: hasattr(
        type(torch.ops.aten.mul.Tensor._handle), "redispatch_boxed"
    ),
    "torch._C._dispatch_get_all_op_names": lambda: hasattr(torch._C, "_dispatch_get_all_op_names"),
    "torch.distributed.ProcessGroup.unbox": lambda: _c10d("ProcessGroup", "unbox"),
    "torch.distributed.distributed_c10d._new_process_group_helper": lambda: group_creation() is not None,
    "torch._C._current_autograd_node": lambda: hasattr(torch._C, "_current_autograd_node"),
    "torch._C._autograd._get_sequence_nr": lambda: hasattr(getattr(torch._C, "_autograd", None), "_get_sequence_nr"),
    "Node._sequence_nr": lambda: hasattr(torch._C._FunctionBase, "_sequence_nr"),
    "ProcessGroup._get_sequence_number_for_group": lambda: _c10d("ProcessGroup", "_get_sequence_number_for_group"),
    "torch.distributed.distributed_c10d._world.pg_map": lambda: _c10d("distributed_c10d", "_world", "pg_map"),
    "torch._C._distributed_c10d.FakeProcessGroup": lambda: hasattr(
        getattr(torch._C, "_distributed_c10d", None), "FakeProcessGroup"
    ),
    "DeviceMesh.get_group": lambda: hasattr(
        getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", torch.distributed), "get_group"
    ),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": lambda: hasattr(
        getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None), "set_code_exec_strategy"
    ),
    "torch._inductor.codecache.PyCodeCache.linemaps": lambda: _loaded("torch._inductor.codecache", "PyCodeCache"),
    "torch.cuda.is_current_stream_capturing": lambda: hasattr(torch.cuda, "is_current_stream_capturing"),
}
"""By the name of a private API: whether this torch has it. Importing nothing."""


def lacks(names: Iterable[str]) -> list[str]:
    """Those of these APIs that this torch does not have, in order."""
    return [name for name in names if not PROBES[name]()]


def missing() -> list[str]:
    """Names of the APIs this torch lacks without which nothing can be recorded; empty when recording can work."""
    from commwatch.agent.recorder.features import COLLECTIVES

    absent = lacks(COLLECTIVES.needs[:1])
    return absent or lacks(COLLECTIVES.needs)


def op_names(namespaces: tuple[str, ...]) -> list[str]:
    """Every registered op of the namespaces, as ``namespace::name`` or ``namespace::name.overload``, sorted."""
    prefixes = tuple(f"{namespace}::" for namespace in namespaces)
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefixes))


def overload(op_name: str) -> Any:
    """The OpOverload behind a dispatcher name."""
    namespace, _, rest = op_name.partition("::")
    name, _, overload_name = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload_name or "default")


def schema_arguments(op_name: str) -> list[tuple[str, str]]:
    """(name, type) of each argument of an op, in order."""
    return [(argument.name, str(argument.type)) for argument in overload(op_name)._schema.arguments]


def redispatcher(op_name: str) -> Callable[..., Any]:
    """Runs an op's kernel for a key set, without the GIL."""
    redispatch: Callable[..., Any] = overload(op_name)._handle.redispatch_boxed
    return redispatch


current_autograd_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
"""The node the autograd engine runs on this thread, or None."""

sequence_number: Callable[[], int] = getattr(getattr(torch._C, "_autograd", None), "_get_sequence_nr", lambda: 0)
"""Number the next autograd node of this thread will get."""

NODES_NUMBERED = hasattr(getattr(torch._C, "_autograd", None), "_get_sequence_nr") and hasattr(
    torch._C._FunctionBase, "_sequence_nr"
)
"""Whether an autograd node can be told from others; without it nothing is said about modules in backward."""

without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
"""A context in which no tensor subclass's ``__torch_function__`` runs on this thread."""

unbox_group: Callable[[Any], Any] = getattr(dist.ProcessGroup, "unbox", None) if dist.is_available() else None  # type: ignore[assignment]
"""The ProcessGroup behind a boxed argument."""


def group_ranks(group: Any) -> list[int]:
    """Global ranks of a process group; empty when torch does not know the group."""
    try:
        return list(dist.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):
        return []


def living_groups() -> list[Any]:
    """Every process group torch knows of in this process."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", ()))


def group_sequence(group: Any) -> int | None:
    """How often a group's backend was given work; None unless gloo alone serves it. Waits for nothing."""
    try:
        backends = [type(group._get_backend(device)).__name__ for device in group._device_types]
        if not backends or set(backends) != {"ProcessGroupGloo"}:
            return None
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError, ValueError):
        return None


def lonely_all_reduce() -> tuple[Callable[[], bool], torch.Tensor]:
    """A call through the dispatcher on a group of one rank in memory, and its tensor.

    The call says whether it is finished. The group is registered nowhere and goes with the two. Its backend is torch's
    own fake one, which neither sends nor changes anything.
    """
    c10d: Any = torch._C._distributed_c10d
    create = getattr(c10d.FakeProcessGroup, "_create_internal", c10d.FakeProcessGroup)  # torch 2.9 has the class alone
    backend = create(0, 1, c10d.FakeProcessGroup.Options())
    group: Any = c10d.ProcessGroup(c10d.HashStore(), 0, 1)
    kind = c10d.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    tensor = torch.tensor([1.0, 2.0], device="cpu")

    def issue() -> bool:
        return bool(group.allreduce([tensor], c10d.AllreduceOptions()).wait())

    return issue, tensor


stream_captures: Callable[[], bool] = getattr(torch.cuda, "is_current_stream_capturing", lambda: False)
"""Whether this thread's current stream on the current device captures a CUDA graph. A read of the driver's state."""


def enters_graph(tensor: torch.Tensor) -> bool:
    """Whether a collective that is given this tensor now is captured into a CUDA graph, to be run by its replays.

    Asks CUDA for tensors that are there alone. It asks what NCCL's process group itself asks at each collective.
    """
    if not tensor.is_cuda:
        return False
    device = tensor.get_device()
    if device == torch.cuda.current_device():
        return stream_captures()
    with torch.cuda.device(device):
        return stream_captures()


def mesh_group(mesh: Any, index: int) -> Any:
    """Process group of a mesh dimension; None when it has none, or when it is of a world that was destroyed.

    Group names are counted anew in each world, so that an old mesh resolves to a group that is not its own.
    """
    try:
        group = mesh.get_group(index)
    except (RuntimeError, KeyError, IndexError, AttributeError, ValueError):
        return None
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    own = getattr(root, "_pg_registry", {}).get(group.group_name, group)
    return group if own is group and group_ranks(group) else None


def node_sequence_number(node: Any) -> int:
    """Number an autograd node got when it was made; -1, which none has, when this torch does not say."""
    return int(node._sequence_nr()) if NODES_NUMBERED else -1


def accumulated(node: Any) -> Any:
    """The parameter whose gradient a node accumulates; None for any other node."""
    return getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None


Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Keep ``torch.compile`` from compiling a function where the program's eager code reaches it, and what it calls.

    Where a region traces through it, it is traced as ever. Imports nothing; without the API nothing is changed.
    """
    evaluation: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    action = getattr(evaluation, "_FrameAction", None)
    if action is not None and hasattr(evaluation, "set_code_exec_strategy"):
        strategy = evaluation._FrameExecStrategy(action.SKIP, action.SKIP)
        evaluation.set_code_exec_strategy(function.__code__, strategy)
    return function


def is_graph_module(module: Any) -> bool:
    """Whether a module is an FX graph."""
    return isinstance(module, torch.fx.GraphModule)


_COMPILERS = tuple(f"{Path(torch.__file__).parent / name}{os.sep}" for name in ("_dynamo", "_functorch"))


def called_by_compiler(frame: Any) -> bool:
    """Whether a compiled region calls the FX graph whose call's frame this is."""
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code.co_filename.startswith(_COMPILERS):
            return True
        frame = frame.f_back
    return False


def restore_kernels(library: Any) -> None:
    """Take away the kernels a Library registered; those before them come back."""
    library._destroy()


def group_creation() -> Callable[..., Any] | None:
    """The function every door to a new process group reaches, as it stands now; None when this torch has none."""
    found: Callable[..., Any] | None = getattr(dist.distributed_c10d, "_new_process_group_helper", None)
    return found


def replace_group_creation(replacement: Callable[..., Any]) -> None:
    """Put another function in its place: it is looked up at each call."""
    dist.distributed_c10d._new_process_group_helper = replacement


def compiled_frames() -> int:
    """Frames ``torch.compile`` compiled in this process; 0 without importing the compiler."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return int(counters["frames"]["ok"]) if counters and "frames" in counters else 0


COMPILED_NAME = "__compiled_fn"
"""What the names of the functions begin with that dynamo puts in a program's place."""


def traced_graph(compiled: Any) -> Any:
    """The FX graph dynamo traced for such a function; None when nothing leads to it."""
    for _ in range(8):
        owner = getattr(getattr(compiled, "named_parameters", None), "__self__", None)
        if owner is not None:
            return getattr(owner, "graph", None)
        compiled = getattr(compiled, "_torchdynamo_orig_callable", None)
    return None


def inductor_stack(path: str, line: int) -> str:
    """The formatted stack from which a line of inductor's code was traced; empty when it kept none."""
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    lines, stacks = getattr(cache, "linemaps", {}).get(path) or ((), ())
    position = bisect_right(lines, line) - 1
    return str(stacks[position] or "") if position >= 0 else ""


def is_fake_store(store: Any) -> bool:
    """Whether this process stands for a rank of a world that does not exist."""
    return type(root_store(store)).__name__ == "FakeStore"


def root_store(store: Any) -> Any:
    """The store below every prefix, which a launcher may keep over the attempts of one job."""
    for _ in range(16):
        below = getattr(store, "underlying_store", None)
        if below is None:
            return store
        store = below
    return store
