from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from commwatch.agent.program.script import checkout_of, script_of

SHOW = (
    "import sys\nfrom commwatch.agent.program.script import script_of\n"
    "found = script_of(sys.modules)\nprint(found.name, found.workload, found.root, sep='|')\n"
)


def shown(folder: Path, *arguments: str, stdin: str = "") -> list[str]:
    finished = subprocess.run(
        [sys.executable, *arguments], cwd=folder, input=stdin, capture_output=True, text=True, check=True
    )
    return finished.stdout.strip().split("|")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jobs" / "llm").mkdir(parents=True)
    (tmp_path / "jobs" / "llm" / "train.py").write_text(SHOW)
    (tmp_path / "jobs" / "llm" / "__main__.py").write_text(SHOW)
    return tmp_path


def test_a_file_is_shown_relative_to_its_folder_or_its_checkout(folder: Path) -> None:
    assert shown(folder, "jobs/llm/train.py") == ["train.py", "train", str(folder / "jobs/llm")]
    (folder / ".git").mkdir()
    assert shown(folder / "jobs", "llm/train.py") == ["jobs/llm/train.py", "train", str(folder)]


def test_a_worktree_is_a_checkout_too(folder: Path) -> None:
    (folder / ".git").write_text("gitdir: elsewhere")
    assert checkout_of(folder / "jobs" / "llm") == folder


def test_a_module_is_called_by_its_name(folder: Path) -> None:
    root = str(folder / "jobs" / "llm")
    assert shown(folder, "-m", "jobs.llm.train") == ["train.py", "jobs.llm.train", root]
    assert shown(folder, "-m", "jobs.llm") == ["__main__.py", "jobs.llm", root]


def test_a_folder_is_called_by_its_name(folder: Path) -> None:
    assert shown(folder, "jobs/llm") == ["__main__.py", "llm", str(folder / "jobs" / "llm")]


def test_without_a_file_it_is_interactive(folder: Path) -> None:
    assert shown(folder, "-c", SHOW) == ["", "interactive", str(folder)]
    assert shown(folder, "-", stdin=SHOW) == ["", "interactive", str(folder)]
    assert script_of({}).workload == "interactive"


def test_a_name_that_is_no_text_is_shown_with_question_marks(folder: Path) -> None:
    odd = folder / "a\udcffb.py"
    odd.write_text(SHOW)
    assert shown(folder, str(odd)) == ["a?b.py", "a?b", str(folder)]
