from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import older_torch


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return older_torch.Skipped.from_parent(parent, path=module_path) if older_torch.skips_file(module_path) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    older_torch.mark(item)


@pytest.fixture
def fake_world() -> Iterator[Callable[..., DeviceMesh]]:
    """Call it with a mesh shape and names: one process that stands for rank 0 of that world."""

    def make(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        size = 1
        for length in shape:
            size *= length
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        meshes.append(init_device_mesh("cpu", shape, mesh_dim_names=names))
        return meshes[-1]

    meshes: list[DeviceMesh] = []
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:
        compiler.counters.clear()  # frames of the tests before are none of this one's program
    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
    meshes.clear()
    gc.collect()  # a mesh of this world must not name the groups of the next test's
