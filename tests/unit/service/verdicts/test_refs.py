"""What names mean, on a real store."""

from __future__ import annotations

import pytest

from commwatch.service.store.contract import Store
from commwatch.service.verdicts import AmbiguousRefError, NoRunError, RefError, UnknownRefError, resolve
from tests.unit.service.domain.jobs import Calls, Job, run_id, sha

STEP = (Calls("all_reduce", "embed"),)


@pytest.fixture
def fed(store: Store) -> Store:
    for job in (
        Job(0x11110001, STEP, commit=5),
        Job(0x11110002, STEP, commit=7),
        Job(0x22220003, STEP, commit=7),
        Job(0x33330004, STEP, commit=7, state="running"),
        Job(0x44440005, STEP, commit=6, branch="feature/x", workload="eval"),
    ):
        job.feed(store)
    return store


@pytest.mark.parametrize(
    ("ref", "number"),
    [
        (run_id(0x11110002), 0x11110002),
        (run_id(0x33330004)[:8], 0x33330004),
        ("2222", 0x22220003),
        (sha(5), 0x11110001),
        (sha(5)[:7].upper(), 0x11110001),
        ("main", 0x22220003),
        ("main~2", 0x11110001),
        ("main~0", 0x22220003),
        ("feature/x", 0x44440005),
        ("main~", 0x44440005),
        ("main~1", 0x44440005),
        ("feature/x~1", 0x11110001),
    ],
)
def test_name_means_the_newest_complete_run(fed: Store, ref: str, number: int) -> None:
    assert resolve(fed, "default", ref).id == run_id(number)


def test_newest_run_counts_where_none_is_complete(fed: Store) -> None:
    Job(0x55550006, STEP, commit=3, state="running").feed(fed)
    Job(0x55550007, STEP, commit=3, state="running").feed(fed)
    assert resolve(fed, "default", sha(3)).id == run_id(0x55550007)


@pytest.mark.parametrize(
    ("ref", "kind", "message", "matches"),
    [
        ("mian", UnknownRefError, "No run, commit or branch of project default is called mian.", ["main"]),
        (
            "eval",
            UnknownRefError,
            "eval is a workload: name a run, commit or branch, and give --workload eval.",
            ["eval"],
        ),
        ("1111", AmbiguousRefError, "1111 is the start of 2 names.", ["11110002-0000", "11110001-0000"]),
        ("main~9", UnknownRefError, f"Only 6 ancestors of main at {sha(7)[:8]} are known.", ["main~6"]),
        (sha(4), NoRunError, f"Commit {sha(4)[:12]} is known, but no run started from it.", []),
        ("main~3", NoRunError, f"Commit {sha(4)[:12]} is known, but no run started from it.", []),
        ("", UnknownRefError, "A run, commit or branch has 1 to 255 characters.", []),
    ],
)
def test_wrong_name_says_what_to_type_instead(
    fed: Store, ref: str, kind: type[RefError], message: str, matches: list[str]
) -> None:
    with pytest.raises(kind) as raised:
        resolve(fed, "default", ref)
    assert (raised.value.message, raised.value.matches, raised.value.ref) == (message, matches, ref)


def test_several_workloads_at_a_commit_must_be_told_apart(fed: Store) -> None:
    Job(0x66660007, STEP, commit=5, workload="eval").feed(fed)
    with pytest.raises(AmbiguousRefError, match="Several workloads ran at main~2: eval, train") as raised:
        resolve(fed, "default", "main~2")
    assert raised.value.matches == ["eval", "train"]
    assert resolve(fed, "default", "main~2", "eval").id == run_id(0x66660007)


def test_newer_run_of_an_older_commit_does_not_move_the_branch_back(fed: Store) -> None:
    Job(0x66660007, STEP, commit=5).feed(fed)
    assert resolve(fed, "default", "main").id == run_id(0x22220003)


def test_names_of_other_projects_are_unknown(fed: Store) -> None:
    with pytest.raises(UnknownRefError, match="Project other has no runs"):
        resolve(fed, "other", run_id(0x11110001))


def test_run_of_another_workload_is_not_meant(fed: Store) -> None:
    with pytest.raises(UnknownRefError, match="is of workload train, not eval"):
        resolve(fed, "default", "2222", "eval")
