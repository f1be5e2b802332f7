"""What every store must do with commits, baselines, comparisons and alerts."""

from __future__ import annotations

import pytest

from commwatch.service.domain.alerts import Alert, AlertEvent
from commwatch.service.domain.records import Commit
from commwatch.service.store.contract import Baseline, Store
from tests.contract.samples import NOW, hello, run_id, sha


def alert(number: int, run: int = 2, fingerprint: str = "v1:a") -> Alert:
    change = {"class": "added", "site": {"module": "layers.*.wo"}, "delta": 2}
    title = f"all_gather added ({number})"
    return Alert(
        run_id(900 + number), fingerprint, "default", "train", "open", run_id(run), run_id(1), title, change, NOW
    )


@pytest.fixture
def three_runs(store: Store) -> Store:
    for run in (1, 2, 3):
        store.open_stream(hello(run, started_unix_ns=NOW + run), NOW)
    return store


def test_chains_of_several_runs_join(store: Store) -> None:
    store.open_stream(hello(1, commit=Commit(sha(3), "main", False, (sha(2), sha(1)), "Three")), NOW)
    store.open_stream(hello(2, commit=Commit(sha(5), "main", False, (sha(4), sha(3)), "Five")), NOW)
    assert store.first_parents("default", sha(5)) == [sha(4), sha(3), sha(2), sha(1)]
    assert store.first_parents("default", sha(5), limit=2) == [sha(4), sha(3)]
    assert store.first_parents("default", sha(1)) == []
    assert store.first_parents("elsewhere", sha(5)) == []


def test_a_shallow_chain_never_shortens_a_longer_one(store: Store) -> None:
    store.open_stream(hello(1, commit=Commit(sha(3), "main", False, (sha(2), sha(1)), "Three")), NOW)
    store.open_stream(hello(2, commit=Commit(sha(3), "main", False, (), "")), NOW)
    assert store.first_parents("default", sha(3)) == [sha(2), sha(1)]
    assert store.run(run_id(2)).commit_subject == "Three"  # type: ignore[union-attr]


def test_a_run_without_a_commit_has_no_ancestors(store: Store) -> None:
    store.open_stream(hello(1, commit=Commit("", "", False, (), "")), NOW)
    assert store.first_parents("default", "") == []
    assert store.commit_shas("default", "") == []
    assert store.run(run_id(1)).commit_subject == ""  # type: ignore[union-attr]


def test_the_first_rank_that_names_a_commit_gives_it_to_the_run(store: Store) -> None:
    unknown, named = Commit("", "", False, (), ""), Commit(sha(3), "main", True, (sha(2),), "Three")
    store.open_stream(hello(1, rank=1, world_size=3, commit=unknown), NOW)
    store.open_stream(hello(1, rank=0, world_size=3, commit=named), NOW)
    store.open_stream(hello(1, rank=2, world_size=3, commit=unknown), NOW)
    store.open_stream(hello(1, rank=2, world_size=3, commit=Commit(sha(9), "side", False, (), "")), NOW)
    run = store.run(run_id(1))
    assert run is not None
    assert (run.commit_sha, run.commit_subject, run.branch, run.dirty) == (sha(3), "Three", "main", True)
    assert store.first_parents("default", sha(3)) == [sha(2)]
    assert store.commit_shas("default", sha(9)) == []


def test_commits_are_found_by_prefix(store: Store) -> None:
    commit = Commit("abc1" + "0" * 36, "main", False, ("abc2" + "0" * 36, "def0" + "0" * 36), "")
    store.open_stream(hello(1, commit=commit), NOW)
    assert store.commit_shas("default", "ABC") == ["abc1" + "0" * 36, "abc2" + "0" * 36]
    assert store.commit_shas("default", "abc", limit=1) == ["abc1" + "0" * 36]
    assert store.commit_shas("default", "abc%") == []
    assert store.commit_shas("elsewhere", "abc") == []


def test_branch_heads_are_newest_first_and_each_once(store: Store) -> None:
    for run, commit in enumerate([3, 4, 3], 1):
        head = Commit(sha(commit), "main", False, (), "")
        store.open_stream(hello(run, commit=head, started_unix_ns=NOW + run), NOW)
    store.open_stream(hello(9, commit=Commit(sha(8), "side", False, (), ""), workload="eval"), NOW)
    assert store.branch_heads("default", "main") == [sha(3), sha(4)]
    assert store.branch_heads("default", "nowhere") == []
    assert store.names("default") == (["eval", "train"], ["main", "side"])
    assert store.names("elsewhere") == ([], [])


def test_accepting_is_idempotent_and_keeps_the_first_reason(three_runs: Store) -> None:
    first = Baseline(run_id(2), "wanted", "ada", NOW)
    assert three_runs.accept(run_id(2), "wanted", "ada", NOW) == first
    assert three_runs.accept(run_id(2), "again", "bob", NOW + 1) == first
    three_runs.accept(run_id(3), "newer", "bob", NOW + 2)
    assert three_runs.baselines("default", "train") == [Baseline(run_id(3), "newer", "bob", NOW + 2), first]
    assert three_runs.baselines("default", "eval") == []
    run = three_runs.run(run_id(2))
    assert run is not None
    assert (run.accepted_reason, run.accepted_by, run.accepted_unix_ns) == ("wanted", "ada", NOW)
    with pytest.raises(KeyError, match=run_id(77)):
        three_runs.accept(run_id(77), "", "", NOW)


def test_comparisons_are_kept_and_the_newest_counts(three_runs: Store) -> None:
    assert three_runs.compared(run_id(2)) is None
    three_runs.record_comparison(run_id(2), None, "no_verdict", "no baseline", [], NOW)
    assert three_runs.compared(run_id(2)) == (None, "no_verdict", "no baseline")
    for _ in range(2):
        three_runs.record_comparison(run_id(2), run_id(1), "same", "", [], NOW)
    assert three_runs.compared(run_id(2)) == (run_id(1), "same", "")
    assert three_runs.compared(run_id(3)) is None
    with pytest.raises(KeyError, match=run_id(77)):
        three_runs.record_comparison(run_id(77), None, "same", "", [], NOW)


def test_one_cause_is_one_open_alert_and_every_run_that_shows_it_names_it(three_runs: Store) -> None:
    opened = alert(1)
    assert three_runs.record_comparison(run_id(2), run_id(1), "regression", "", [opened], NOW) == [opened]
    assert three_runs.record_comparison(run_id(2), run_id(1), "regression", "", [alert(2)], NOW) == []
    other = alert(4, 3, "v1:b")
    assert three_runs.record_comparison(run_id(3), run_id(1), "regression", "", [alert(3, 3), other], NOW) == [other]
    assert three_runs.alerts() == [other, opened]
    assert three_runs.alerts(run_id=run_id(2)) == [opened]
    assert three_runs.alerts(run_id=run_id(3)) == [other, opened]
    assert three_runs.alerts(limit=1) == [other]
    assert three_runs.alerts(project="elsewhere") == []
    assert [run.open_alerts for run in three_runs.runs()] == [2, 1, 0]


def test_the_same_fingerprint_of_another_workload_is_another_alert(three_runs: Store) -> None:
    three_runs.open_stream(hello(4, workload="eval"), NOW)
    three_runs.record_comparison(run_id(2), run_id(1), "regression", "", [alert(1)], NOW)
    assert len(three_runs.record_comparison(run_id(4), run_id(1), "regression", "", [alert(2, 4)], NOW)) == 1
    assert {item.workload for item in three_runs.alerts()} == {"train", "eval"}


def test_accepting_a_run_accepts_the_alerts_it_shows_for_good(three_runs: Store) -> None:
    three_runs.record_comparison(run_id(2), run_id(1), "regression", "", [alert(1)], NOW)
    three_runs.record_comparison(run_id(3), run_id(1), "regression", "", [alert(2, 3)], NOW)
    three_runs.accept(run_id(3), "wanted", "ada", NOW + 5)
    assert [item.state for item in three_runs.alerts()] == ["accepted"]
    assert three_runs.alerts(state="open") == []
    assert three_runs.alert_events(alert(1).id) == [
        AlertEvent(NOW, "", "open", "commwatch", "all_gather added (1)"),
        AlertEvent(NOW + 5, "open", "accepted", "ada", "wanted"),
    ]
    # Evaluated again while it still runs: what was accepted is not opened again.
    assert three_runs.record_comparison(run_id(3), run_id(1), "regression", "", [alert(3, 3)], NOW) == []
    # A run that shows it later, and was not accepted, opens it again.
    three_runs.open_stream(hello(5), NOW)
    assert len(three_runs.record_comparison(run_id(5), run_id(1), "regression", "", [alert(4, 5)], NOW)) == 1
