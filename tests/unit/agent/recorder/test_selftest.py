"""The self-test tells a process in which interposition does not work, and leaves nothing behind."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from commwatch.agent import record, session
from commwatch.agent.recorder import catalog, features, interpose, selftest, torch_private
from commwatch.agent.recorder.local import RecordError

dist: Any = torch.distributed  # its stores and groups have no stubs
World = Callable[..., DeviceMesh]


def kernels() -> dict[str, str]:
    return {name: torch._C._dispatch_dump(name) for name, _ in catalog.all_ops()}


def test_it_passes_here_and_leaves_nothing() -> None:
    before = kernels()
    assert selftest.failure() == ""
    assert not dist.is_initialized()
    assert torch_private.living_groups() == []
    assert kernels() == before
    assert not interpose.installed()


def test_beyond_the_kernels_it_takes_less_than_two_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignore(op: catalog.Op, args: tuple[Any, ...]) -> None:
        return None

    interpose.add(ignore)
    try:
        monkeypatch.setattr(interpose, "installed", lambda: False)  # so that it runs all the same
        taken = []
        for _ in range(20):
            began = time.perf_counter()
            assert selftest.failure() == ""
            taken.append(time.perf_counter() - began)
    finally:
        interpose.remove(ignore)
    assert sorted(taken)[10] < 0.002


def test_the_next_sink_takes_over_and_never_sees_the_proof(fake_world: World) -> None:
    fake_world(2)
    seen: list[str] = []

    def see(op: catalog.Op, args: tuple[Any, ...]) -> None:
        seen.append(op.kind)

    try:
        assert selftest.failure(then=see) == ""
        assert seen == []
        dist.all_reduce(torch.ones(1))
    finally:
        interpose.remove(see)
    assert seen == ["all_reduce"]


def not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpose, "add", lambda sink: None)


def seen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    add = interpose.add
    monkeypatch.setattr(interpose, "add", lambda sink: (add(sink), add(sink)))


def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    lonely = torch_private.lonely_all_reduce

    def make() -> Any:
        issue, tensor = lonely()

        def spoiled() -> bool:
            finished = issue()
            tensor.add_(1)
            return finished

        return spoiled, tensor

    monkeypatch.setattr(torch_private, "lonely_all_reduce", make)


def raising(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "redispatcher", lambda name: None)


@pytest.mark.parametrize(
    ("sabotage", "text"),
    [
        (not_seen, "a call through the dispatcher was not seen"),
        (seen_twice, "one c10d::allreduce_ was seen as c10d::allreduce_, c10d::allreduce_"),
        (changed, "a call came back changed"),
        (raising, "a call through the dispatcher raised TypeError"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_recorded(
    sabotage: Callable[[pytest.MonkeyPatch], None], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kernels()
    sabotage(monkeypatch)
    with pytest.raises(RecordError, match="the self-test failed") as raised, record():
        pass
    assert text in str(raised.value)
    assert kernels() == before
    assert not interpose.installed()


def test_a_job_whose_self_test_fails_runs_unrecorded_and_says_so_in_one_line(
    fake_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_world(2)
    changed(monkeypatch)
    spool = tmp_path / "spool"
    store = dist.HashStore()
    with caplog.at_level(logging.WARNING, "commwatch"):
        session.start(world_size=1, rank=0, store=store, environ={"COMMWATCH_SPOOL_DIR": str(spool)})
    assert [line.getMessage() for line in caplog.records if line.name == "commwatch"] == [
        "commwatch: not recording: the self-test failed: a call came back changed; run `commwatch doctor`"
    ]
    assert session.current() is None
    assert list(spool.glob("*/*")) == []
    dist.all_reduce(torch.ones(1))


def test_every_feature_names_known_apis_and_this_torch_has_them() -> None:
    assert {name for feature in features.FEATURES for name in feature.needs} == set(torch_private.PROBES)
    assert features.reduced() == []
    assert features.reduced_text() == ""


@pytest.mark.parametrize("name", sorted(torch_private.PROBES))
def test_a_missing_api_is_named_with_what_goes_without_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_private.PROBES, name, lambda: False)
    touched = [feature for feature in features.FEATURES if name in feature.needs]
    assert [feature for feature, absent in features.reduced() if absent == [name]] == touched
    assert all(f"without {name} {feature.without}" in features.reduced_text() for feature in touched)
    assert torch_private.missing() == ([name] if features.COLLECTIVES in touched else [])


def test_without_numbers_of_nodes_backward_has_no_module_and_the_rest_has(
    fake_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(2)
    monkeypatch.setattr(torch_private, "NODES_NUMBERED", False)

    class Both(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from torch.distributed import _functional_collectives as functional

            gathered: torch.Tensor = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
            return gathered

    with record() as recorded:
        torch.nn.Sequential(Both())(torch.ones(2, requires_grad=True)).sum().backward()
    assert [(call.phase, call.module) for call in recorded.calls()] == [("forward", "0"), ("backward", "")]
