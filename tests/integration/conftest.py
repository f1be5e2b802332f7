from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import older_torch
from tests.integration.live_service import LiveService


def pytest_itemcollected(item: pytest.Item) -> None:
    older_torch.mark(item)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LiveService]:
    """A service that is ready."""
    folder = tmp_path / "service"
    folder.mkdir()
    live = LiveService(folder)
    live.start()
    yield live
    live.stop()
