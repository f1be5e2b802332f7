"""The kernels in front of the collectives: without the GIL, on every key, gone without a trace."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed

from commwatch.agent.recorder import catalog, interpose, torch_private

dist: Any = torch.distributed  # its stores and groups have no stubs


def test_the_gil_is_free_while_a_collective_waits() -> None:
    """Two ranks of one process meet in gloo: the first waits for the second, which must be able to run Python."""
    store = dist.HashStore()
    seen: list[str] = []
    groups: dict[int, Any] = {}

    def connect(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(dist.PrefixStore("gil", store), rank, 2)

    connecting = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in connecting:
        thread.start()
    for thread in connecting:
        thread.join(30)
    assert sorted(groups) == [0, 1]

    def see(op: catalog.Op, args: tuple[object, ...]) -> None:
        seen.append(op.kind)

    process_groups = {}
    for rank, backend in groups.items():
        group = dist.ProcessGroup(dist.PrefixStore(f"group{rank}", store), rank, 2)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        process_groups[rank] = group
    results = {rank: torch.full((4,), float(rank + 1)) for rank in range(2)}

    def reduce(rank: int) -> None:
        process_groups[rank].allreduce([results[rank]], dist.AllreduceOptions()).wait()

    interpose.add(see)
    try:
        reducing = [threading.Thread(target=reduce, args=(rank,), daemon=True) for rank in range(2)]
        for thread in reducing:
            thread.start()
        for thread in reducing:
            thread.join(30)
        assert not any(thread.is_alive() for thread in reducing)
    finally:
        interpose.remove(see)
    assert seen == ["all_reduce", "all_reduce"]
    assert [result.tolist() for result in results.values()] == [[3.0] * 4] * 2


def test_redispatch_lets_another_thread_run() -> None:
    turns = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1

    matrix = torch.randn(1500, 1500)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    multiply = torch_private.redispatcher("aten::mm")
    counting = threading.Thread(target=count)
    counting.start()
    try:
        before = turns
        multiply(keys, matrix, matrix)
        during = turns - before
    finally:
        stop.set()
        counting.join()
    # A call that kept the GIL would let the other thread run for a few switches at its edges at most.
    assert during > 10_000


def test_every_collective_has_the_kernel_while_somebody_looks() -> None:
    def ignore(op: catalog.Op, args: tuple[object, ...]) -> None:
        return None

    names = [name for name, _ in catalog.all_ops() if name.startswith("c10d::")]
    assert len(names) >= 19
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    interpose.add(ignore)
    try:
        assert [name for name in names if not has(name, torch_private.KEY)] == []
    finally:
        interpose.remove(ignore)
    assert [name for name in names if has(name, torch_private.KEY)] == []


@pytest.mark.parametrize("key", ["CPU", "CUDA", "PrivateUse1"])
def test_no_backend_kernel_is_replaced(key: str) -> None:
    def ignore(op: catalog.Op, args: tuple[object, ...]) -> None:
        return None

    def kernels() -> list[str]:
        dump = torch._C._dispatch_dump("c10d::allreduce_")
        return [line for line in dump.splitlines() if line.startswith(f"{key}:")]

    before = kernels()
    interpose.add(ignore)
    try:
        assert kernels() == before
    finally:
        interpose.remove(ignore)
    assert len(before) == 1
