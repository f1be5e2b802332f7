"""Which run another is compared with, and the words that say why."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from commwatch.service.domain.baselines import (
    ChosenBaseline,
    NoBaseline,
    choose_baseline,
    effective_base,
    path_between,
)
from tests.unit.service.domain.jobs import Job, ancestors, run_id, sha

HEAD = Job(100, commit=9)


def choose(candidates: Sequence[Job], head: Job = HEAD) -> ChosenBaseline | NoBaseline:
    known = ancestors(head.commit) if head.has_commit else ()
    return choose_baseline(head.run(), [job.run() for job in candidates], known)


def chosen(candidates: Sequence[Job], head: Job = HEAD) -> tuple[str, str]:
    found = choose(candidates, head)
    assert isinstance(found, ChosenBaseline), found
    return found.run.id, found.reason


def test_nearest_ancestor_wins_over_a_newer_run_further_back() -> None:
    candidates = [Job(1, commit=8), Job(2, commit=6), Job(3, commit=12)]
    assert chosen(candidates) == (run_id(1), "the parent commit")


def test_newest_run_of_the_nearest_commit_is_taken() -> None:
    candidates = [Job(1, commit=6), Job(3, commit=6), Job(2, commit=6)]
    assert chosen(candidates) == (run_id(3), "the nearest ancestor with a run, 3 commits back")


def test_accepted_run_goes_first_at_its_commit_even_when_dirty() -> None:
    candidates = [Job(1, commit=8, dirty=True, accepted="needed"), Job(2, commit=8)]
    assert chosen(candidates) == (run_id(1), "the parent commit, accepted by Ada: needed")


@pytest.mark.parametrize(
    "unfit",
    [
        Job(1, commit=8, dirty=True),
        Job(1, commit=8, state="running"),
        Job(1, commit=8, state="lost"),
        Job(1, commit=8, workload="eval"),
        Job(1, commit=8, project="other"),
        Job(1, commit=10),
    ],
)
def test_unfit_runs_are_passed_over(unfit: Job) -> None:
    assert chosen([unfit, Job(2, commit=7)]) == (run_id(2), "the nearest ancestor with a run, 2 commits back")
    assert choose([unfit]) == NoBaseline(
        f"None of the 8 known ancestors of {sha(9)[:8]} has a complete, clean or accepted run of train."
    )


def test_run_of_the_same_commit_counts_only_when_accepted() -> None:
    assert isinstance(choose([Job(1, commit=9)]), NoBaseline)
    assert chosen([Job(1, commit=9, accepted="ok")]) == (run_id(1), "the same commit, accepted by Ada: ok")


def test_dirty_head_is_compared_with_the_clean_run_of_its_commit() -> None:
    head = Job(100, commit=9, dirty=True)
    candidates = [Job(1, commit=9), Job(2, commit=9, dirty=True), Job(3, commit=8)]
    assert chosen(candidates, head) == (run_id(1), "the same commit without the changes of the tree")


def test_unequal_environments_are_passed_over_and_named_when_nothing_else_is_left() -> None:
    unequal = Job(1, commit=8, backend="nccl 2.27")
    assert chosen([unequal, Job(2, commit=5)])[0] == run_id(2)
    found = choose([unequal])
    assert isinstance(found, NoBaseline)
    assert found.reason == (
        "No ancestor has a run of train in this environment; "
        f"the nearest, 00000001-0000 at {sha(8)[:8]}, differs in backend nccl 2.27 instead of gloo."
    )
    assert [part.run.id for part in found.nearest_unequal] == [run_id(1)]


def test_head_without_a_commit_has_only_accepted_runs_without_one() -> None:
    head = Job(100, has_commit=False)
    assert choose([Job(1, has_commit=False)], head) == NoBaseline(
        "The commit of the run is unknown, so it has no ancestors. Set COMMWATCH_COMMIT, or accept a run."
    )
    found = chosen([Job(1, has_commit=False, accepted="ok")], head)
    assert found == (run_id(1), "a run without a commit, like this one, accepted by Ada: ok")


def test_accepted_run_between_base_and_head_stands_in_for_the_base() -> None:
    base, head = Job(1, commit=5).run(), HEAD.run()
    path = path_between(base.commit_sha, head.commit_sha, ancestors(5), ancestors(9))
    assert path == [sha(9), sha(8), sha(7), sha(6)]
    accepted = [Job(2, commit=6, accepted="one").run(), Job(3, commit=8, accepted="two").run()]
    found = effective_base(base, head, accepted, path)
    assert found is not None
    assert (found.run.id, found.reason) == (run_id(3), "accepted by Ada: two")


@pytest.mark.parametrize(
    "accepted",
    [
        Job(2, commit=5, accepted="at the base"),
        Job(2, commit=10, accepted="beyond the head"),
        Job(2, commit=8, accepted="x", workload="eval"),
        Job(2, commit=8, accepted="x", backend="nccl"),
    ],
)
def test_accepted_run_off_the_path_or_unlike_the_head_does_not_stand_in(accepted: Job) -> None:
    base, head = Job(1, commit=5).run(), HEAD.run()
    path = path_between(base.commit_sha, head.commit_sha, ancestors(5), ancestors(9))
    assert effective_base(base, head, [accepted.run()], path) is None


def test_accepted_head_stands_in_for_any_base() -> None:
    head = Job(100, commit=9, accepted="wanted").run()
    found = effective_base(Job(1, commit=5).run(), head, [head], [sha(9)])
    assert found is not None
    assert found.run == head


def test_path_of_diverged_branches_ends_at_the_commit_they_share() -> None:
    assert path_between("b", "h", ["x", "s", "r"], ["g", "s", "r"]) == ["h", "g"]
    assert path_between("b", "h", [], ["g"]) == ["h"]
    assert path_between("h", "h", ["g"], ["g"]) == ["h"]
