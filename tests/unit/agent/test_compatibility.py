"""The table of releases says what is so on the torch these tests run on, and the document is the table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from commwatch.agent.compatibility import RELEASES, as_markdown, measured
from commwatch.agent.debug import torch_private as debug_private
from commwatch.agent.recorder import features

DOCUMENT = Path(__file__).parents[3] / "docs" / "compatibility.md"
HERE = torch.__version__.split("+")[0]


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
