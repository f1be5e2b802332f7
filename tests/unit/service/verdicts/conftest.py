from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from commwatch.service.store.contract import Store
from commwatch.service.store.opening import open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'commwatch.db'}", migrate=True)
    yield opened
    opened.close()
