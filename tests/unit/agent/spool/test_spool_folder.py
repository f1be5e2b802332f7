from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commwatch.agent.spool import names
from commwatch.agent.spool.folder import make_rank_directory, make_spool_dir
from commwatch.agent.spool.process import RankProcess, keep_process

NOBODY = 65534


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder as /tmp is one."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_what_is_made_is_for_its_owner_alone(shared: Path) -> None:
    make_rank_directory(shared / "spool" / "run" / "0-0")
    make_rank_directory(shared / "spool" / "run" / "0-1")
    modes = [path.stat().st_mode & 0o777 for path in sorted([shared / "spool", *shared.rglob("spool/**/*")])]
    assert modes == [0o700] * 4


def test_a_link_in_a_shared_folder_is_refused(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (shared / "spool").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a folder of this user"):
        make_spool_dir(shared / "spool")
    (shared / "own").mkdir()
    (shared / "own" / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a folder of this user"):
        make_rank_directory(shared / "own" / "run" / "0-0")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to somebody else")
def test_somebody_elses_folder_is_refused_where_everybody_may_create(shared: Path, tmp_path: Path) -> None:
    for parent in (shared, tmp_path):
        (parent / "spool").mkdir()
        os.chown(parent / "spool", NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="not a folder of this user"):
        make_rank_directory(shared / "spool" / "run" / "0-0")
    make_rank_directory(tmp_path / "spool" / "run" / "0-0")  # a team's folder, named by hand


def test_a_path_under_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        make_rank_directory(tmp_path / "file" / "run" / "0-0")


SLEEPS = [sys.executable, "-c", "print(flush=True); import sys; sys.stdin.read()"]


def test_a_process_runs_until_it_is_gone_and_a_zombie_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(SLEEPS, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        keep_process(tmp_path, process.pid)
        rank = RankProcess(tmp_path, process.pid)
        assert not rank.ended()
        process.send_signal(signal.SIGSTOP)
        assert not rank.ended()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody took note of it
        assert Path(f"/proc/{process.pid}/stat").exists()
        assert rank.ended()
    assert rank.ended()
    assert RankProcess(tmp_path, process.pid).ended()


def test_the_same_process_id_after_another_boot_is_not_the_rank(tmp_path: Path) -> None:
    keep_process(tmp_path, os.getpid())
    assert not RankProcess(tmp_path, os.getpid()).ended()
    kept = (tmp_path / names.PROCESS).read_text().split()
    (tmp_path / names.PROCESS).write_text(f"{kept[0]} {kept[1]} 00000000-0000-0000-0000-000000000000\n")
    assert RankProcess(tmp_path, os.getpid()).ended()
