"""Whatever function of op-level recording raises, and whenever: the job computes the same and nothing stays behind."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import pkgutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules import module as module_hooks
from torch.utils._debug_mode import _mode as torch_mode
from torch.utils.checkpoint import checkpoint

from commwatch.agent import capture as capture_package
from commwatch.agent import debug as debug_package
from commwatch.agent.capture.plan import Plan
from commwatch.agent.debug import DebugMode
from commwatch.agent.debug.op_recorder import OpRecorder
from commwatch.agent.recorder import interpose
from commwatch.agent.recorder.recorder import Recorder
from tests.unit.agent.debug.programs import NormedMLP
from tests.unit.agent.recorder.memory_sink import MemorySink

World = Callable[..., DeviceMesh]
FLAGS: dict[str, Any] = {
    "record_torchfunction": True,
    "record_faketensor": True,
    "record_tensor_attributes": ["tag"],
    "record_nn_module": True,
    "store_original_args": True,
    "record_stack_trace": True,
    "record_ids": True,
    "run_compile_with_interpreter": True,
}
STEPS = 2
AT = (1, 2, 5)

EDGES = {
    "debug.op_recorder.OpRecorder.__enter__",
    "debug.op_recorder.OpRecorder.__exit__",
    "debug.op_recorder.OpRecorder.__torch_dispatch__",
    "debug.op_recorder.OpRecorder.__torch_function__",
    "debug.op_recorder.OpRecorder._with_hooks",
    "debug.op_recorder.OpRecorder._handled",
    "debug.op_recorder.OpRecorder.ignore_compile_internals",
    "debug.op_recorder.OpRecorder.record_output_placements",
    "debug.op_recorder.OpRecorder.record_redistribute_calls",
    "debug.op_recorder._Deeper.__enter__",
    "debug.op_recorder._Deeper.__exit__",
    "debug.recording.Recording._guarded",
    "debug.module_entries.ModuleEntries._before",
    "debug.module_entries.ModuleEntries._after",
    "capture.capturer.Capturer.step_begins",
    "capture.capturer.Capturer.step_ended",
    "capture.capturer.Capturer.saw",
    "capture.capturer.Capturer.running",
    "capture.capturer.Capturer.close",
    "capture.op_capture.OpCapture.entered",
    "capture.op_capture.OpCapture.left",
    # What takes back what was done, without which it stays; at the end of the job or of a captured step.
    "debug.module_entries.ModuleEntries.remove",
    "debug.torch_private.count_active",
}
"""What torch, the recorder or the user calls: they are where everything else is caught, so nobody could catch them."""


class OnPurposeError(Exception):
    """No exception the recorder could expect."""


def modules() -> Iterator[tuple[str, Any]]:
    for name, package in (("debug", debug_package), ("capture", capture_package)):
        for found in pkgutil.iter_modules(package.__path__):
            if not found.name.startswith("comm_"):
                yield f"{name}.{found.name}", importlib.import_module(f"{package.__name__}.{found.name}")


def functions() -> dict[str, tuple[Any, str]]:
    """Every function, method and property written in the two packages: where it hangs, and its name there."""
    found: dict[str, tuple[Any, str]] = {}
    for path, module in modules():
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                found[f"{path}.{name}"] = (module, name)
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                for attribute, method in vars(value).items():
                    function = plain(method)
                    if function is not None and function.__code__.co_filename == module.__file__:
                        found[f"{path}.{name}.{attribute}"] = (value, attribute)
    return dict(sorted(found.items()))


def plain(method: Any) -> Any:
    """The function behind what stands in a class; None when there is none."""
    if isinstance(method, property):
        method = method.fget
    elif isinstance(method, (staticmethod, classmethod)):
        method = method.__func__
    return method if inspect.isfunction(method) else None


FUNCTIONS = functions()


@contextlib.contextmanager
def wrapped(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put another function in a function's place, also where other modules imported it by name."""
    holder, attribute = FUNCTIONS[name]
    original = vars(holder)[attribute]
    replacement: Any = wrap(plain(original))
    if isinstance(original, property):
        replacement = property(replacement, original.fset)
    elif isinstance(original, (staticmethod, classmethod)):
        replacement = type(original)(replacement)
    places = [(holder, attribute)]
    for _, module in modules() if inspect.ismodule(holder) else ():
        places += [(module, alias) for alias, value in vars(module).items() if value is original]
    for place, alias in places:
        setattr(place, alias, replacement)
    try:
        yield
    finally:
        for place, alias in places:
            setattr(place, alias, original)


def counting(name: str, calls: Counter[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return replacement

    return wrap


def raising(at: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Raises at its n-th call, before it does anything; otherwise the original."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        calls = itertools.count(1)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == at:
                raise OnPurposeError(original.__qualname__)
            return original(*args, **kwargs)

        return replacement

    return wrap


class Training:
    """FSDP2 around a tensor-parallel block that is recomputed, a head, and an implicit redistribute."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([NormedMLP(), nn.Linear(16, 4)])
        parallelize_module(self.blocks[0], mesh["tp"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        fully_shard(self.blocks[0], mesh=mesh["dp"])
        self.optimizer = torch.optim.SGD(self.blocks.parameters(), lr=0.1)
        self.mesh = mesh

    def step(self) -> torch.Tensor:
        x = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
        with torch.profiler.record_function("forward"):
            y = checkpoint(self.blocks[0], x, use_reentrant=False)
        loss: torch.Tensor = self.blocks[1](y).square().mean()
        loss.backward()
        left = DTensor.from_local(torch.ones(1, 4), self.mesh["tp"], [Shard(0)], run_check=False)
        right = DTensor.from_local(torch.ones(2, 4), self.mesh["tp"], [Shard(0)], run_check=False)
        torch.mm(left, right)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().clone()

    def results(self) -> list[torch.Tensor]:
        found: list[Any] = list(self.blocks.parameters())
        local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in found]
        return [parameter.detach().clone() for parameter in local]


def state() -> tuple[int, int, int, int, int, int, bool]:
    return (
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch_mode._ACTIVE_DEBUG_MODE_COUNT,
        len(module_hooks._global_forward_pre_hooks),
        len(module_hooks._global_forward_hooks),
        len(module_hooks._global_forward_hooks_always_called),
        torch.is_anomaly_enabled(),
    )


def bare(mesh: DeviceMesh) -> list[torch.Tensor]:
    training = Training(mesh)
    return [training.step() for _ in range(STEPS)] + training.results()


class UnderMode:
    """The training under a ``DebugMode``. Faults begin when the mode is entered."""

    name = "under DebugMode"

    def __init__(self, mesh: DeviceMesh) -> None:
        self.training = Training(mesh)
        self.mode = DebugMode(**FLAGS)

    def run(self) -> list[torch.Tensor]:
        losses = []
        for _ in range(STEPS):
            with self.mode:
                losses.append(self.training.step())
        return losses + self.training.results()

    def wrong(self) -> str:
        return ""


class UnderCapture:
    """The training under a recorder that captures each step. Faults begin when the job begins."""

    name = "under Plan(every=True)"

    def __init__(self, mesh: DeviceMesh) -> None:
        self.errors: list[BaseException] = []
        self.sink = MemorySink()
        self.training = Training(mesh)
        self.recorder = Recorder(self.sink, Path(__file__).parent, self.errors.append, Plan(every=True, hashes="norm"))

    def run(self) -> list[torch.Tensor]:
        try:
            self.recorder.start()
            return [self.training.step() for _ in range(STEPS)] + self.training.results()
        finally:
            self.recorder.stop()
            self.recorder.finish()

    def wrong(self) -> str:
        if self.errors:
            return f"the recorder failed: {self.errors}"
        steps = self.sink.steps()
        return "" if steps == [(1, STEPS, KINDS)] else f"recorded {steps}"


KINDS = ["all_gather", "all_reduce", "all_reduce", "reduce_scatter", "all_gather"]
"""Collectives of each step, in order of issue."""


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    interpose._forget()
    with interpose._lock:
        interpose._uninstall()


@pytest.mark.usefixtures("clean")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [UnderMode, UnderCapture], ids=["mode", "capture"])
def test_a_raising_function_leaves_the_job_as_it_was(
    kind: type[UnderMode] | type[UnderCapture], fake_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    mesh = fake_world(2, 2, names=("dp", "tp"))
    expected = bare(mesh)
    before = state()
    calls: Counter[str] = Counter()
    job = kind(mesh)
    with contextlib.ExitStack() as stack:
        for name in FUNCTIONS:
            stack.enter_context(wrapped(name, counting(name, calls)))
        job.run()
    assert job.wrong() == ""
    assert len(calls) > 40, sorted(calls)
    wrong = []
    for name in sorted(set(calls) - EDGES):
        for at in sorted({min(at, calls[name]) for at in AT}):
            where = f"{name} at its call {at} of {calls[name]} {kind.name}"
            job, before = kind(mesh), state()
            with wrapped(name, raising(at)):
                try:
                    found = job.run()
                except Exception as error:  # noqa: BLE001  every one of them is listed
                    wrong.append(f"{where} raised {error!r} into the job")
                    continue
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                wrong.append(f"{where} changed what the job computes")
            if state() != before:
                wrong.append(f"{where} left {state()} behind, {before} was there")
            if job.wrong():
                wrong.append(f"{where}: {job.wrong()}")
    assert wrong == [], "\n".join(wrong)


class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        raise OnPurposeError("of the op")


def test_what_an_op_raises_passes_unchanged(fake_world: World) -> None:
    mesh = fake_world(4, names=("tp",))
    raised = OnPurposeError("by the kernel")
    library = torch.library.Library("commwatch_test", "FRAGMENT")
    library.define("faulty(Tensor x) -> Tensor")

    def kernel(x: torch.Tensor) -> torch.Tensor:
        raise raised

    library.impl("faulty", kernel, "CPU")
    before = state()
    mode = DebugMode(**FLAGS)
    x = torch.ones(2, 2)
    with mode:
        with pytest.raises(OnPurposeError) as found:
            torch.ops.commwatch_test.faulty(x)
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            torch.mm(x, torch.ones(3, 2))
        shared = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        with pytest.raises(Exception, match="faulty"):  # DTensor knows no sharding for it
            torch.ops.commwatch_test.faulty(shared)
        with pytest.raises(OnPurposeError, match="of the op"):
            Faulty.apply(x)  # type: ignore[no-untyped-call]  # as torch has it
        x.sin()
    assert found.value is raised
    assert (mode.failure, mode.call_depth, state()) == (None, 0, before)
    assert [call.name for call in mode.operators if call.kind == "op"][-1] == "aten::sin"
    library._destroy()


def test_what_a_subgraph_raises_passes_unchanged_and_its_ops_run_once() -> None:
    calls = []

    def subgraph(x: torch.Tensor) -> tuple[torch.Tensor]:
        calls.append(x)
        raise OnPurposeError("inside")

    before = state()
    with DebugMode(record_nn_module=True) as mode, pytest.raises(OnPurposeError, match="inside"):
        torch.ops.higher_order.invoke_subgraph(subgraph, "part", torch.ones(2))
    assert len(calls) == 1
    assert (mode.failure, mode.call_depth, state()) == (None, 0, before)


@pytest.mark.parametrize("hook", ["record_hook", "log_hook", "pre_log_hook"])
def test_what_a_hook_raises_is_the_users(hook: str) -> None:
    def raises(*_args: Any) -> NoReturn:
        raise OnPurposeError(hook)

    mode = DebugMode()
    with mode, DebugMode.dispatch_hooks(**{hook: raises}), pytest.raises(OnPurposeError, match=hook):
        torch.ones(2)
    with mode:
        torch.ones(2).sin()
    assert (mode.failure, mode.call_depth) == (None, 0)
    assert [call.name for call in mode.operators] == ["aten::ones", "aten::ones", "aten::sin"]


@pytest.mark.parametrize("inside", ["_op", "_module", "_output", "_redistribute"])
def test_what_a_signal_handler_raises_passes(inside: str, fake_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a time limit ends the job while the recorder runs."""
    mesh = fake_world(2, 2, names=("dp", "tp"))

    def handler(_number: int, _frame: FrameType | None) -> NoReturn:
        raise OnPurposeError("time is over")

    def signalled(*_args: Any, **_kwargs: Any) -> None:
        signal.raise_signal(signal.SIGALRM)

    previous = signal.signal(signal.SIGALRM, handler)
    before = state()
    training = Training(mesh)
    try:
        with DebugMode(**FLAGS) as mode:
            monkeypatch.setattr(OpRecorder, inside, signalled)
            with pytest.raises(OnPurposeError, match="time is over"):
                training.step()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert mode.failure is None
    assert state() == before
