from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from commwatch.agent.program.commit import Commit, describe_commit

PATH = {"PATH": os.environ["PATH"]}


class Checkout:
    """A git repository of its own, whatever this machine's git is set up with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        who = {f"GIT_{role}_{what}": "test" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(self.folder)}
        command = ["git", *arguments]
        finished = subprocess.run(
            command, cwd=self.folder, env={**PATH, **who, **settings}, check=True, capture_output=True, text=True
        )
        return finished.stdout.strip()

    def commit(self, subject: str) -> str:
        (self.folder / "train.py").write_text(subject)
        self.git("add", "train.py")
        self.git("commit", "-q", "-m", subject)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


def described(checkout: Checkout, **variables: str) -> Commit:
    return describe_commit(checkout.folder, {**PATH, **variables})


def test_a_branch_names_its_commit_and_ancestors_nearest_first(checkout: Checkout) -> None:
    first, second, third = (checkout.commit(subject) for subject in ("One", "Two", "Drei: größer"))
    assert described(checkout) == Commit(third, "main", False, (second, first), "Drei: größer")


def test_only_first_parents_are_ancestors(checkout: Checkout) -> None:
    first = checkout.commit("One")
    checkout.git("checkout", "-q", "-b", "topic")
    checkout.git("commit", "-q", "--allow-empty", "-m", "Beside")
    checkout.git("checkout", "-q", "main")
    second = checkout.commit("Two")
    checkout.git("merge", "-q", "--no-ff", "-m", "Merge", "topic")
    assert described(checkout).ancestors == (second, first)


def test_at_most_200_ancestors(checkout: Checkout) -> None:
    stream = "".join(
        f"commit refs/heads/main\ncommitter t <t@t> {number} +0000\ndata 1\n.\n" for number in range(1, 204)
    )
    subprocess.run(["git", "fast-import", "--quiet"], cwd=checkout.folder, input=stream, text=True, check=True)
    everything = checkout.git("rev-list", "main").split()
    found = described(checkout)
    assert len(everything) == 203
    assert (found.sha, list(found.ancestors)) == (everything[0], everything[1:201])


def test_a_tracked_difference_is_dirty_and_a_new_file_is_not(checkout: Checkout) -> None:
    checkout.commit("One")
    (checkout.folder / "notes.txt").write_text("new")
    assert not described(checkout).dirty
    (checkout.folder / "train.py").write_text("changed")
    assert described(checkout).dirty


def test_a_detached_head_has_the_branch_that_ci_names(checkout: Checkout) -> None:
    first = checkout.commit("One")
    checkout.git("checkout", "-q", "--detach")
    assert described(checkout) == Commit(first, "", False, (), "One")
    assert described(checkout, GIT_BRANCH="origin/main").branch == "main"
    assert described(checkout, GITHUB_HEAD_REF="topic", GITHUB_REF_NAME="12/merge").branch == "topic"
    assert described(checkout, CI_COMMIT_REF_NAME="topic", COMMWATCH_BRANCH="mine").branch == "mine"


def test_the_checked_out_branch_is_before_what_ci_names(checkout: Checkout) -> None:
    checkout.commit("One")
    assert described(checkout, CI_COMMIT_REF_NAME="other").branch == "main"


def test_a_shallow_clone_has_the_ancestors_it_holds(checkout: Checkout, tmp_path: Path) -> None:
    _first, second, third = (checkout.commit(subject) for subject in ("One", "Two", "Three"))
    checkout.git("clone", "-q", "--depth=2", f"file://{checkout.folder}", str(tmp_path / "shallow"))
    assert describe_commit(tmp_path / "shallow", PATH) == Commit(third, "main", False, (second,), "Three")


def test_a_configured_commit_is_looked_up(checkout: Checkout) -> None:
    first, second = checkout.commit("One"), checkout.commit("Two")
    (checkout.folder / "train.py").write_text("changed")
    assert described(checkout, COMMWATCH_COMMIT=first[:10]) == Commit(first, "main", False, (), "One")
    assert described(checkout, COMMWATCH_COMMIT=second) == Commit(second, "main", True, (first,), "Two")


def test_a_configured_commit_that_git_does_not_know_is_kept(checkout: Checkout) -> None:
    checkout.commit("One")
    assert described(checkout, COMMWATCH_COMMIT="release-7") == Commit("release-7", "main")
    assert described(checkout, COMMWATCH_COMMIT="f" * 40) == Commit("f" * 40, "main")


@pytest.mark.parametrize("variable", ["GITHUB_SHA", "CI_COMMIT_SHA", "GIT_COMMIT", "BUILDKITE_COMMIT", "CIRCLE_SHA1"])
def test_without_git_the_ci_system_names_the_commit(tmp_path: Path, variable: str) -> None:
    assert describe_commit(tmp_path, {**PATH, variable: "a" * 40}) == Commit("a" * 40)
    assert describe_commit(tmp_path, {**PATH, variable: "no commit"}) == Commit()


def test_a_folder_without_anything_is_unknown(tmp_path: Path) -> None:
    assert describe_commit(tmp_path, PATH) == Commit()
    assert describe_commit(tmp_path / "gone", {"PATH": str(tmp_path)}) == Commit()


def test_a_repository_without_a_commit_has_its_branch(checkout: Checkout) -> None:
    assert described(checkout) == Commit(branch="main")


def test_variables_of_another_repository_are_not_followed(checkout: Checkout, tmp_path: Path) -> None:
    first = checkout.commit("One")
    other = Checkout(tmp_path / "other")
    other.commit("Other")
    variables = {"GIT_DIR": str(other.folder / ".git"), "GIT_WORK_TREE": str(other.folder)}
    assert described(checkout, **variables).sha == first


@pytest.mark.parametrize(
    "setting",
    [
        "core.fsmonitor={program}",
        "core.hooksPath={folder}",
        "core.pager={program}",
        "pager.log={program}",
        "gpg.program={program}",
        "log.showSignature=true",
        "diff.external={program}",
    ],
)
def test_no_program_that_the_repository_names_is_run(checkout: Checkout, tmp_path: Path, setting: str) -> None:
    first = checkout.commit("One")
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    trace = tmp_path / "ran"
    for name in ("program", "post-index-change", "fsmonitor-watchman"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {trace}\n")
        (hooks / name).chmod(0o755)
    key, _, value = setting.format(program=hooks / "program", folder=hooks).partition("=")
    checkout.git("config", key, value)
    (checkout.folder / "train.py").touch()
    assert described(checkout).sha == first
    assert not trace.exists()


def test_a_git_that_hangs_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "COMMWATCH_COMMIT": "abc"}
    assert describe_commit(tmp_path, variables, budget_s=0.2) == Commit("abc")
