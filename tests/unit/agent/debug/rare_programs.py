"""Programs for rarer kinds of records; as those of ``programs``."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.unit.agent.debug.programs import Program


class Rectified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


def local_tensors() -> Program:
    with LocalTensorMode(2) as mode:
        x: Any = mode.rank_map(lambda rank: torch.full((2, 2), float(rank)))

    def run() -> None:
        y = x + 1
        (y @ y).sum()
        torch.ones(1)

    return run


def local_tensors_in_their_mode() -> Program:
    def run() -> None:
        with LocalTensorMode(2) as mode:
            x: Any = mode.rank_map(lambda rank: torch.full((2, 2), float(rank)))
            (x + 1).sum()

    return run


def deferred(mesh: DeviceMesh) -> Program:
    """AsyncCollectiveTensors: views of them do not wait, other ops do."""

    def run() -> None:
        x = torch.ones(4, 4)
        functional.all_reduce(x, "sum", mesh) + 1
        gathered = functional.all_gather_single(x, 0, mesh)
        gathered.view(-1).sum()
        partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
        partial.redistribute(mesh, [Replicate()], async_op=True) * 2

    return run


def compiled_modules() -> Program:
    torch._dynamo.reset()
    compiled: Any = torch.compile(Rectified(), backend="aot_eager")
    x = torch.ones(4, 4, requires_grad=True)
    compiled(x).sum().backward()
    return lambda: compiled(x).sum().backward()


def nested_region() -> Program:
    torch._dynamo.reset()

    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    def twice(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = region(x) * region(x * 2)
        return product

    compiled: Any = torch.compile(twice, backend="aot_eager")
    x = torch.ones(4, requires_grad=True)
    compiled(x).sum().backward()
    return lambda: compiled(x).sum().backward()


def subgraph() -> Program:
    def part(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.sin() + 1,)

    def run() -> None:
        torch.ops.higher_order.invoke_subgraph(part, "part", torch.ones(4))

    return run


def compiled_now() -> Program:
    """Compiled while the mode is active."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x.sin() + 1).sum(), backend="aot_eager")
    return lambda: compiled(torch.ones(16))


def inductor_region() -> Program:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x.sin() + 1).sum())

    def run() -> None:
        with inductor.patch(wrap_inductor_compiled_regions=True):
            compiled(torch.ones(16))

    run()
    return run


def inference() -> Program:
    model, x = Rectified(), torch.ones(4, 4)

    def run() -> None:
        with torch.inference_mode():
            model(x).add_(1)

    return run


def transforms() -> Program:
    def run() -> None:
        torch.func.grad(lambda x: (x.sin() * 2).sum())(torch.ones(3))
        torch.func.vmap(lambda x: x @ x.t())(torch.ones(2, 3, 3))
        torch.func.jacrev(lambda x: x * x)(torch.ones(2))

    return run


def saved_tensor_hooks() -> Program:
    def run() -> None:
        x = torch.ones(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved * 1):
            y = (x * x).sin()
        y.sum().backward()
        with torch.autograd.graph.save_on_cpu():
            (x * x).sum().backward()

    return run


def jagged() -> Program:
    def run() -> None:
        x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=torch.jagged)
        (x + 1).sin()

    run()  # the first jagged tensor of a process makes two more
    return run


def sparse() -> Program:
    def run() -> None:
        x = torch.eye(3).to_sparse()
        x @ torch.ones(3, 2)
        x.coalesce().values()
        torch.eye(3).to_sparse_csr() @ torch.ones(3, 2)

    return run


def element_types() -> Program:
    def run() -> None:
        torch.view_as_real(torch.ones(2, dtype=torch.complex64).conj() * 1j)
        torch.empty(2, dtype=torch.float8_e4m3fn)
        torch.ones(2, dtype=torch.bool).any()
        torch.ones(2, dtype=torch.uint16)

    return run


def meta_and_scalars() -> Program:
    def run() -> None:
        meta = torch.empty(2, 3, device="meta")
        meta @ meta.t()
        scalar = torch.tensor(3.0)
        bool(scalar * 2 > 1)
        scalar.item()

    return run


def symbolic_shapes() -> Program:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic: Any = StatelessSymbolicContext
    context = dynamic(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.ones(5, 3), symbolic_context=context)

    def run() -> None:
        with mode:
            y = x + 1
            torch.cat([y, y]).view(-1)

    return run


def outputs() -> Program:
    """``out=``, in place, tuples and named tuples, also of Python functions."""

    def run() -> None:
        torch.add(torch.ones(3), 1, out=torch.empty(3))
        torch.max(torch.ones(2, 2), 1, out=(torch.empty(2), torch.empty(2, dtype=torch.int64)))
        torch.max(torch.ones(2, 2), 1)
        torch.linalg.svd(torch.eye(2))
        torch.topk(torch.ones(3), 2)
        x = torch.ones(3)
        x += 1
        x[0] = 2
        x.mul_(2).clamp_(0, 1)
        torch.broadcast_tensors(x, torch.ones(2, 3))
        torch.meshgrid(x, x, indexing="ij")
        torch.einsum("i,j->ij", x, x)
        torch.unique(x, return_counts=True)

    return run


def range_entered_before() -> Program:
    began = record_function("before")
    began.__enter__()

    def run() -> None:
        torch.ones(1)
        with record_function("inside"):
            torch.ones(2)

    return run


def higher_order() -> Program:
    def run() -> None:
        torch.cond(torch.tensor(True), lambda x: x.sin(), lambda x: x.cos(), (torch.ones(2),))

    return run


def another_thread() -> Program:
    def run() -> None:
        torch.ones(1)
        thread = threading.Thread(target=lambda: torch.ones(2).sin())
        thread.start()
        thread.join()
        torch.ones(3)

    return run


def selective_checkpoint() -> Program:
    model, x = Rectified(), torch.ones(4, 4, requires_grad=True)
    context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return lambda: checkpoint(model, x, use_reentrant=False, context_fn=context).sum().backward()
