"""The tree of modules and its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from commwatch.agent import record
from commwatch.agent.recorder.tree import tree

World = Callable[..., DeviceMesh]
CALLS = [
    ("layers.0.attention", "forward", "all_gather"),
    ("layers.0.attention", "backward", "reduce_scatter"),
    ("layers.0", "forward", "all_gather"),
    ("(root)", "forward", "all_reduce"),
    ("Critic.head", "forward", "all_reduce"),
    ("", "other", "barrier"),
]


def test_every_node_has_its_own_and_its_parts_counts() -> None:
    found = tree(CALLS, frozenset({"Critic"}))
    assert [child.name for child in found.children] == ["(root)", "Critic"]
    assert found.own == {("other", "barrier"): 1}
    assert found.find("layers").own == Counter()
    assert found.find("layers").total == {("forward", "all_gather"): 2, ("backward", "reduce_scatter"): 1}
    assert found.find("Critic").total == {("forward", "all_reduce"): 1}
    assert sum(found.total.values()) == len(CALLS)


def test_the_text_is_indented() -> None:
    whole = "forward all_gather 2 all_reduce 2, backward reduce_scatter 1, other barrier 1"
    assert str(tree(CALLS, frozenset({"Critic"}))).splitlines() == [
        f"(program): {whole}; own: other barrier 1",
        "  (root): forward all_gather 2 all_reduce 1, backward reduce_scatter 1; own: forward all_reduce 1",
        "    layers: forward all_gather 2, backward reduce_scatter 1; own: none",
        "      layers.0: forward all_gather 2, backward reduce_scatter 1; own: forward all_gather 1",
        "        layers.0.attention: forward all_gather 1, backward reduce_scatter 1",
        "  Critic: forward all_reduce 1; own: none",
        "    Critic.head: forward all_reduce 1",
    ]


def test_a_module_that_issued_nothing_is_named_in_the_error() -> None:
    with pytest.raises(KeyError, match=r"no collective of module .*: there are \(root\), layers, layers\.0"):
        tree([("layers.0", "forward", "all_gather")]).find("layers.1")


class Reducing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x


def test_a_second_model_stands_beside_the_first(fake_world: World) -> None:
    fake_world(2)
    models = [nn.Sequential(Reducing()), Reducing(), nn.Sequential(nn.Sequential(Reducing()))]
    with record() as recorded:
        for model in models:
            model(torch.ones(1))
    found = recorded.modules()
    assert {child.name: sum(child.total.values()) for child in found.children} == {
        "(root)": 1,
        "Reducing": 1,
        "Sequential": 1,
    }
