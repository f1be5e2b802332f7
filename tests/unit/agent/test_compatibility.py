"""The table of releases says what is so on the torch these tests run on, and the document is the table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from commwatch.agent import session
from commwatch.agent.capture.plan import Plan
from commwatch.agent.compatibility import RELEASES, as_markdown, measured
from commwatch.agent.debug import torch_private as debug_private
from commwatch.agent.recorder import features, interpose
from commwatch.agent.recorder.recorder import Recorder
from tests.unit.agent.recorder.memory_sink import MemorySink

dist: Any = torch.distributed  # its stores and groups have no stubs
World = Callable[..., DeviceMesh]

DOCUMENT = Path(__file__).parents[3] / "docs" / "compatibility.md"
HERE = torch.__version__.split("+")[0]
NO_CAPTURES = (
    "commwatch: recording less than it could: without torch.utils._debug_mode "
    "collectives are recorded but no step is captured op by op; run `commwatch doctor`"
)


def test_this_release_lacks_what_its_column_says() -> None:
    columns = {release.torch: dict(release.lacking) for release in RELEASES}
    if HERE not in columns:
        pytest.skip(f"torch {HERE} is none of the releases in the table")
    assert measured() == columns[HERE]


def test_columns_name_features() -> None:
    names = [feature.name for feature in features.EVERY]
    assert len(set(names)) == len(names)
    assert all(set(release.lacking) <= set(names) for release in RELEASES)


def test_a_probe_that_fails_changes_the_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    assert measured()["`CommDebugMode`"] == ("torch._C._current_graph_task_id",)
    monkeypatch.setattr(debug_private, "_module", None)
    assert measured()["op level"] == measured()["`DebugMode`"] == ("torch.utils._debug_mode",)


def test_the_documentation_is_the_table() -> None:
    assert DOCUMENT.read_text() == as_markdown()


@pytest.fixture
def no_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.9 is."""
    monkeypatch.setattr(debug_private, "_module", None)


@pytest.fixture
def no_session() -> Iterator[None]:
    yield
    current = session.current()
    if current is not None:
        current.end()
    session._in_child()


@pytest.mark.usefixtures("no_debug_mode", "no_session")
@pytest.mark.parametrize(
    ("variables", "lines"),
    [({}, []), ({"COMMWATCH_LEVEL": "ops"}, [NO_CAPTURES]), ({"COMMWATCH_CAPTURE_STEPS": "3"}, [NO_CAPTURES])],
)
def test_a_job_that_asks_for_captures_is_told_at_its_start_that_there_are_none(
    fake_world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, variables: dict[str, str], lines: list[str]
) -> None:
    fake_world(2)
    environ = {"COMMWATCH_SPOOL_DIR": str(tmp_path / "spool"), **variables}
    with caplog.at_level(logging.WARNING, "commwatch"):
        session.start(world_size=1, rank=0, store=dist.HashStore(), environ=environ)
    assert [line.getMessage() for line in caplog.records if line.name == "commwatch"] == lines
    assert session.current() is not None
    assert interpose.installed()


@pytest.mark.usefixtures("no_debug_mode")
def test_captures_are_answered_with_what_is_lacking_and_steps_are_recorded(fake_world: World) -> None:
    fake_world(2)
    sink = MemorySink()
    errors: list[BaseException] = []
    recorder = Recorder(sink, Path(__file__).parent, errors.append, Plan(((1, 1),)))
    recorder.start()
    for step in range(3):
        dist.all_reduce(torch.ones(1))
        if step == 0:
            sink.request = (1, 1)
        recorder.step()
    recorder.stop()
    recorder.finish()
    assert errors == []
    lacking = "this torch lacks torch.utils._debug_mode"
    assert [(part.step, part.request, part.last_part, part.reason) for part in sink.captures] == [
        (1, 0, True, lacking),
        (2, 1, True, lacking),
    ]
    assert sink.steps() == [(1, 3, ["all_reduce"])]


@pytest.mark.usefixtures("no_debug_mode")
def test_debug_mode_is_refused_with_what_is_lacking() -> None:
    from commwatch.agent.debug.debug_mode import DebugMode, DebugModeError

    with pytest.raises(DebugModeError, match=r"^cannot record ops: this torch lacks torch\.utils\._debug_mode$"):
        DebugMode()
