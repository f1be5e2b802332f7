from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from commwatch.service.store.contract import Store
from commwatch.service.store.opening import open_store


@pytest.fixture(params=["sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each engine."""
    assert request.param == "sqlite"
    return f"sqlite:///{tmp_path / 'commwatch.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url, migrate=True)
    yield opened
    opened.close()
