"""Property: over any module tree, a module's own counts and its children's totals make its total, and none is lost."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from commwatch.agent import record
from commwatch.agent.debug import CommDebugMode
from tests.unit.agent.debug.comm_programs import c10d, functional, world

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


Issued = tuple[int, str, Any]
"""Identity of a module, direction, key."""


class Node(nn.Module):
    """Runs its steps: collectives of its own, and its children, any of them several times or run again in backward."""

    def __init__(self, steps: list[Any], issued: Counter[Issued]) -> None:
        super().__init__()
        self.children_ = nn.ModuleList(Node(inner, issued) for kind, inner in steps if kind == "child")
        self.steps, self.issued = steps, issued

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        children = iter(self.children_)
        for kind, inner in self.steps:
            if kind == "reduce":
                self.note(functional.all_reduce)
                value = funcol.all_reduce(value, "sum", world()) * 0.5
            elif kind == "plain":
                self.note(c10d.allreduce_)
                dist.all_reduce(torch.zeros(2))
            elif kind == "barrier":
                self.note(c10d.barrier)
                dist.barrier()
            elif kind == "raise":
                raise ArithmeticError
            else:
                value = self.run(next(children), value, len(inner))
        return value

    def note(self, key: Any) -> None:
        again = torch._C._current_graph_task_id() != -1
        self.issued[id(self), "backward" if again else "forward", key] += 1

    def run(self, child: nn.Module, value: torch.Tensor, how: int) -> torch.Tensor:
        try:
            if how % 4 == 3:
                return checkpoint(child, value, use_reentrant=how % 8 == 3)  # type: ignore[no-any-return]  # untyped
            for _ in range(1 + how % 2):
                value = child(value)
        except ArithmeticError:
            pass
        return value


LEAVES = st.sampled_from([("reduce", None), ("plain", None), ("barrier", None), ("raise", None)])
STEPS = st.recursive(
    st.lists(LEAVES, max_size=4),
    lambda inner: st.lists(LEAVES | st.tuples(st.just("child"), inner), max_size=4),
    max_leaves=12,
)


def totals(counts: Any, name: str) -> dict[str, Counter[Any]]:
    found = counts.get(name, {})
    return {direction: Counter(dict(found.get(direction, {}))) for direction in ("forward", "backward")}


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_own_and_children_make_the_total_and_nothing_is_lost(steps: list[Any]) -> None:
    issued: Counter[Issued] = Counter()
    mode, model = CommDebugMode(), Node(steps, issued)
    value = torch.rand(2, requires_grad=True)
    with record() as recorded, mode, contextlib.suppress(ArithmeticError):
        model(value).sum().backward()
    tree = mode.advanced_module_tracker.parent_dict
    for name in mode.advanced_module_tracker.module_helper_dict:
        own, total = totals(mode.comm_module_own_counts, name), totals(mode.comm_module_counts, name)
        for direction in ("forward", "backward"):
            below = sum((totals(mode.comm_module_counts, child)[direction] for child in tree.get(name, [])), Counter())
            assert own[direction] + below == total[direction]
    everything = totals(mode.comm_module_counts, "Global")
    assert everything["forward"] + everything["backward"] == Counter(mode.get_comm_counts())
    assert mode.get_total_counts() == len(recorded.calls())

    names = {id(module): mode.advanced_module_tracker.get_known_fqn(module) for module in model.modules()}
    for (identity, direction, key), count in issued.items():
        found = mode.comm_module_own_counts[str(names[identity])][direction][key]
        if key is functional.all_reduce and direction == "backward":
            assert found >= count  # gradients are reduced as well
        else:
            assert found == count
    plain = Counter(key for _, _, key in issued.elements())
    for key in (c10d.allreduce_, c10d.barrier):
        assert mode.get_comm_counts()[key] == plain[key]
