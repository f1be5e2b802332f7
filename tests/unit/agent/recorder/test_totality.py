"""Whatever function of the recorder raises, and whenever: the job computes the same and hears of it in one line."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizers

from commwatch.agent import recorder as package
from commwatch.agent import session
from commwatch.agent.capture.plan import Plan
from commwatch.agent.recorder import interpose
from commwatch.agent.spool.writer import SpoolWriter
from commwatch.v1 import ingest_pb2
from tests.unit.agent.recorder.training import train

World = Callable[..., DeviceMesh]
OUTSIDE = {"local", "tree"}
"""``record`` is called by the user, who is told what went wrong; the rest serves jobs."""


class OnPurposeError(Exception):
    """No exception the recorder could expect."""


def modules() -> Iterator[Any]:
    for found in pkgutil.iter_modules(package.__path__):
        if found.name not in OUTSIDE:
            yield importlib.import_module(f"{package.__name__}.{found.name}")


def functions() -> dict[str, tuple[Any, str]]:
    """Every function and method written in the package: where it hangs, and its name there."""
    found: dict[str, tuple[Any, str]] = {}
    for module in modules():
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                found[f"{module.__name__}.{name}"] = (module, name)
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                for attribute, method in vars(value).items():
                    if inspect.isfunction(method) and method.__code__.co_filename == module.__file__:
                        found[f"{module.__name__}.{name}.{attribute}"] = (value, attribute)
    return {name.removeprefix(f"{package.__name__}."): place for name, place in sorted(found.items())}


FUNCTIONS = functions()
EDGES = {
    "modules.ModuleTracker._before",
    "modules.ModuleTracker._after",
    "modules._Closing.__call__",
    "recorder.Recorder._after_optimizer",
    "recorder.Recorder._guard",
    "recorder.Recorder.step",
}
"""What torch or the user calls: they are where everything else is caught, so nobody could catch them."""


def everywhere(holder: Any, name: str, replacement: Any) -> list[tuple[Any, str, Any]]:
    """Replace a function also where other modules imported it by name. Returns what stood there."""
    original = vars(holder)[name]
    places = [(holder, name, original)]
    for module in modules() if inspect.ismodule(holder) else ():
        places += [(module, alias, value) for alias, value in vars(module).items() if value is original]
    for place, alias, _ in places:
        setattr(place, alias, replacement)
    return places


def counting(original: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(*args, **kwargs)

    return replacement


def raising(original: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Raises at its n-th call, before it does anything; otherwise the original."""
    calls = itertools.count(1)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise OnPurposeError(original.__qualname__)
        return original(*args, **kwargs)

    return replacement


class Job:
    """One job with the agent, as ``activation`` starts it."""

    def __init__(self, folder: Path, mesh: DeviceMesh) -> None:
        self.folder, self.mesh = folder, mesh

    def run(self) -> list[torch.Tensor]:
        hello = ingest_pb2.Hello(run_id="0", world_size=2)
        spool = SpoolWriter(self.folder, hello, 1 << 20)
        log = logging.getLogger("commwatch")
        try:
            current = session.Session(Path.cwd(), spool, Plan())
            current.begin()
        except Exception as error:  # noqa: BLE001  what activation does when recording cannot start
            log.warning("commwatch: not recording: %s", error)
            return train(self.mesh)
        try:
            return train(self.mesh)
        finally:
            current.recorder.step()
            current.end()


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    interpose._forget()
    with interpose._lock:
        interpose._uninstall()
    module_hooks._global_forward_hooks.clear()
    module_hooks._global_forward_pre_hooks.clear()
    module_hooks._global_forward_hooks_always_called.clear()
    optimizers._global_optimizer_post_hooks.clear()


@contextlib.contextmanager
def replaced(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put back what stood there."""
    try:
        yield
    finally:
        for place, alias, value in places:
            setattr(place, alias, value)


def called_by(job: Job) -> Counter[str]:
    """How often the job calls each function."""
    calls: Counter[str] = Counter()
    places = []
    for name, (holder, attribute) in FUNCTIONS.items():
        places += everywhere(holder, attribute, counting(vars(holder)[attribute], name, calls))
    with replaced(reversed(places)):
        job.run()
    return calls


@pytest.mark.usefixtures("clean")
def test_a_raising_function_leaves_the_job_as_it_was(
    fake_world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = fake_world(2)
    expected = train(mesh)
    calls = called_by(Job(tmp_path / "counted", mesh))
    assert len(calls) > 100, sorted(set(FUNCTIONS) - set(calls))
    wrong = []
    for name in sorted(set(calls) - EDGES):
        holder, attribute = FUNCTIONS[name]
        for at in {1, calls[name]}:
            caplog.clear()
            where = f"{name} at its call {at} of {calls[name]}"
            found: list[torch.Tensor] = []
            with replaced(everywhere(holder, attribute, raising(vars(holder)[attribute], at))):
                try:
                    found = Job(tmp_path / f"{name}-{at}", mesh).run()
                except Exception as error:  # noqa: BLE001  every one of them is listed
                    wrong.append(f"{where} raised {error!r} into the job")
            if found and not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                wrong.append(f"{where} changed what the job computes")
            lines = [record.getMessage() for record in caplog.records if record.name == "commwatch"]
            if len(lines) > 1:
                wrong.append(f"{where} logged {lines}")
            try:
                dist.all_reduce(torch.ones(2))
            except Exception as error:  # noqa: BLE001  every one of them is listed
                wrong.append(f"after {where} collectives raise {error!r}")
    assert wrong == [], "\n".join(wrong)
