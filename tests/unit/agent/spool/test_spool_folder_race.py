from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from commwatch.agent.spool import folder as spool_folder
from commwatch.agent.spool.folder import make_rank_directory


def deleting(root: Path, times: int) -> Callable[[Path], None]:
    """The check of an owner, after which a forwarder deletes the run's folder, so often."""
    left, check = [times], spool_folder._require_own

    def check_and_delete(found: Path) -> None:
        check(found)
        if found == root and left[0]:
            left[0] -= 1
            os.rmdir(root)  # noqa: PTH106  as SpoolReader.delete does, in another process

    return check_and_delete


@pytest.mark.parametrize("times", [1, 9])
def test_a_rank_arrives_while_the_last_of_the_attempt_before_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    root = tmp_path / "run"
    monkeypatch.setattr(spool_folder, "_require_own", deleting(root, times))
    make_rank_directory(root / "1-0")
    assert (root / "1-0").is_dir()


def test_a_folder_that_always_goes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_folder, "_require_own", deleting(tmp_path / "run", 1000))
    with pytest.raises(FileNotFoundError):
        make_rank_directory(tmp_path / "run" / "1-0")
