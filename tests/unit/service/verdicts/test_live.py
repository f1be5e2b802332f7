"""What the service decides by itself while runs report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commwatch.service.store.contract import Store
from commwatch.service.verdicts import evaluate, gate, live
from tests.unit.service.domain.jobs import NOW, Calls, Job, layers, run_id, sha

GOOD = layers(4, Calls("all_reduce", "layers.*.wo", 2))
BAD = (*GOOD, *layers(4, Calls("all_gather", "layers.*.wo")))
BASE = Job(1, GOOD, commit=7)
HEAD = Job(2, BAD, commit=8)


def test_regression_is_recorded_and_alerts_once(store: Store) -> None:
    BASE.feed(store)
    HEAD.feed(store)
    for _ in range(3):
        evaluate(store, HEAD.id, NOW)
    assert store.compared(HEAD.id) == (run_id(1), "regression", "Compared with run 00000001-0000: the parent commit.")
    assert [alert.title for alert in store.alerts()] == ["+1 all_gather per layer (x4) in layers.*.wo, forward"]


def test_running_run_is_judged_as_soon_as_it_is_steady_on_every_rank(store: Store) -> None:
    BASE.feed(store)
    running = replace(HEAD, state="running", steps=2)
    running.feed(store)
    evaluate(store, HEAD.id, NOW)
    assert store.compared(HEAD.id) is None
    replace(HEAD, number=3, state="running", steps=3).feed(store)
    evaluate(store, run_id(3), NOW)
    compared = store.compared(run_id(3))
    assert compared is not None
    assert compared[1] == "regression"


def test_without_a_baseline_the_reason_is_recorded(store: Store) -> None:
    BASE.feed(store)
    evaluate(store, BASE.id, NOW)
    reason = f"None of the 6 known ancestors of {sha(7)[:8]} has a complete, clean or accepted run of train."
    assert store.compared(BASE.id) == (None, "no_verdict", reason)
    assert store.alerts() == []


def test_ended_run_without_a_steady_step_gets_no_verdict(store: Store) -> None:
    BASE.feed(store)
    replace(HEAD, steps=2).feed(store)
    evaluate(store, HEAD.id, NOW)
    assert store.compared(HEAD.id) == (None, "no_verdict", "Ranks 0-3 ran no pattern for 3 steps.")


def test_accepting_closes_the_alert_and_later_runs_compare_with_the_accepted(store: Store) -> None:
    BASE.feed(store)
    HEAD.feed(store)
    evaluate(store, HEAD.id, NOW)
    store.accept(HEAD.id, "needed", "Ada", NOW)
    evaluate(store, HEAD.id, NOW)
    assert [alert.state for alert in store.alerts()] == ["accepted"]
    again = Job(3, BAD, commit=8)
    again.feed(store)
    evaluate(store, again.id, NOW)
    reason = "Compared with run 00000002-0000: the same commit, accepted by Ada: needed."
    assert store.compared(again.id) == (run_id(2), "same", reason)


def test_equal_records_are_compared_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    BASE.feed(store)
    HEAD.feed(store)
    evaluate(store, HEAD.id, NOW)

    def fail(*_: object) -> None:
        raise AssertionError("compared again")

    monkeypatch.setattr(live, "load_steady", fail)
    evaluate(store, HEAD.id, NOW)
    Job(3, GOOD, commit=7).feed(store)
    with pytest.raises(AssertionError, match="compared again"):
        evaluate(store, HEAD.id, NOW)


def test_unknown_run_is_ignored(store: Store) -> None:
    evaluate(store, run_id(9), NOW)


def test_nearest_baseline_is_found_behind_many_newer_runs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "CANDIDATES", 2)
    Job(1, GOOD, commit=6).feed(store)
    Job(2, GOOD, commit=3).feed(store)
    for number in (3, 4, 5):
        Job(number, GOOD, commit=12).feed(store)
    head = Job(6, BAD, commit=8)
    head.feed(store)
    evaluate(store, head.id, NOW)
    compared = store.compared(head.id)
    assert compared is not None
    assert compared[0] == run_id(1)


@pytest.mark.parametrize(
    ("base", "head", "code", "message"),
    [
        (
            BASE,
            replace(HEAD, state="running"),
            "incomplete_run",
            "The head run is still running: 4 of 4 ranks reported.",
        ),
        (
            replace(BASE, dirty=True),
            HEAD,
            "dirty_base",
            (
                "The base run is of a dirty tree and nobody accepted it. "
                "To do so: commwatch accept 00000001-0000 --reason TEXT"
            ),
        ),
        (replace(BASE, backend="mpi"), HEAD, "different_environment", "backend differs: base mpi, head gloo."),
        (
            replace(BASE, commit=3),
            HEAD,
            "no_baseline",
            f"The base run: Commit {sha(7)[:12]} is known, but no run of workload train started from it.",
        ),
        (
            replace(BASE, steps=1),
            HEAD,
            "no_steady_pattern",
            "The base run: Ranks 0-3 ran no pattern for 3 steps.",
        ),
    ],
)
def test_gate_without_a_fair_comparison_has_no_verdict(
    store: Store, base: Job, head: Job, code: str, message: str
) -> None:
    base.feed(store)
    head.feed(store)
    found = gate(store, "default", "main~1", sha(8), None, strict=False)
    assert found.verdict == "no_verdict"
    assert [(reason.code, reason.message) for reason in found.reasons] == [(code, message)]


def test_gate_names_the_lost_rank_of_an_incomplete_head(store: Store) -> None:
    BASE.feed(store)
    HEAD.feed(store, endings={2: "lost"})
    found = gate(store, "default", "main~1", "main", None, strict=False)
    assert [reason.message for reason in found.reasons] == ["The head run is lost: rank 2 lost."]


def test_gate_prefers_the_base_run_of_an_equal_environment(store: Store) -> None:
    BASE.feed(store)
    replace(BASE, number=5, backend="mpi").feed(store)
    HEAD.feed(store)
    found = gate(store, "default", sha(7), "main", None, strict=False)
    assert found.base is not None
    assert (found.base.id, found.verdict) == (run_id(1), "regression")
