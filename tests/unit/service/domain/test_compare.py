"""Comparison: what is a change, what is not, and how it reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commwatch.service.domain.changes import Change, Comparison, NoVerdict
from commwatch.service.domain.compare import compare
from commwatch.service.domain.policy import judge
from commwatch.service.domain.records import Cause, Group, Line
from commwatch.service.domain.wording import effect, payload_sentence, sentence
from tests.unit.service.domain.jobs import IMPLICIT, TP, Calls, Job, Step, layers

LINE = Line("model.py", 88, "forward")
REDUCE = Calls("all_reduce", "layers.*.wo", 2)
GATHER = Calls("all_gather", "layers.*.wo", 2, payload=1024, cause=IMPLICIT, line=LINE)


def compared(base: Job, head: Job) -> Comparison:
    found = compare(base.steady(), head.steady())
    assert isinstance(found, Comparison), found
    return found


def sentences(found: Comparison) -> list[str]:
    return [f"{judged.severity}: {sentence(judged.change)}" for judged in judge(found).changes]


def test_added_calls_of_every_layer_are_one_change_with_cause_and_line() -> None:
    found = compared(Job(1, layers(4, REDUCE)), Job(2, layers(4, REDUCE, GATHER)))
    (change,) = found.changes
    assert sentence(change) == (
        "+2 all_gather per layer (x4) in layers.*.wo, forward: "
        "implicit redistribute S(0) -> R asked by aten.mm.default at model.py:88"
    )
    assert (change.change, change.delta_calls, change.delta_per_rank, change.delta_bytes) == ("added", 32, 8, 32_768)
    assert effect(change) == "+32 calls, +32.8 kB payload per step over 4 ranks"
    assert judge(found).verdict() == "regression"


def test_removed_calls_are_information() -> None:
    found = compared(Job(1, layers(4, REDUCE, GATHER)), Job(2, layers(4, REDUCE)))
    assert sentences(found) == [
        (
            "info: -2 all_gather per layer (x4) in layers.*.wo, forward: "
            "implicit redistribute S(0) -> R asked by aten.mm.default at model.py:88"
        )
    ]
    assert judge(found).verdict(strict=True) == "changed"


@pytest.mark.parametrize(
    ("kind", "severity", "verdict", "strict"),
    [
        ("all_gather", "alert", "regression", "regression"),
        ("reduce_scatter", "alert", "regression", "regression"),
        ("all_reduce", "warn", "changed", "regression"),
        ("all_to_all", "warn", "changed", "regression"),
    ],
)
def test_more_calls_alert_or_warn_by_kind(kind: str, severity: str, verdict: str, strict: str) -> None:
    ballast = Calls("broadcast", "embed", payload=1_000_000)
    base = Job(1, (ballast, Calls(kind, "lm_head")))
    found = compared(base, Job(2, (ballast, Calls(kind, "lm_head", 3))))
    assert sentences(found) == [f"{severity}: +2 {kind} in lm_head, forward (4 -> 12 calls per step)"]
    assert (judge(found).verdict(), judge(found).verdict(strict=True)) == (verdict, strict)


def test_deeper_model_with_equal_calls_per_layer_is_scaled_and_no_change() -> None:
    base = Job(1, layers(4, REDUCE), modules={"layers.*.wo": 4})
    found = compared(base, Job(2, layers(8, REDUCE), modules={"layers.*.wo": 8}))
    assert found.changes == ()
    (scaled,) = found.scaled
    assert (scaled.base_calls, scaled.head_calls, scaled.base_instances, scaled.head_instances) == (32, 64, 16, 32)
    assert judge(found).verdict() == "same"
    assert judge(found).payload.unexplained == 0


def test_deeper_model_with_more_calls_per_layer_is_a_change() -> None:
    base = Job(1, layers(4, GATHER), modules={"layers.*.wo": 4})
    head = Job(2, layers(8, replace(GATHER, times=3)), modules={"layers.*.wo": 8})
    assert sentences(compared(base, head)) == [
        (
            "alert: +16 all_gather in layers.*.wo, forward "
            "(32 -> 96 calls per step; 4 -> 8 modules call it; 16 -> 32 such modules): "
            "implicit redistribute S(0) -> R asked by aten.mm.default at model.py:88"
        )
    ]


def test_more_layers_that_call_is_a_change_when_the_model_has_as_many_as_before() -> None:
    gather = Calls("all_gather", "layers.*.wo")
    found = compared(
        Job(1, layers(1, gather), modules={"layers.*.wo": 4}), Job(2, layers(4, gather), modules={"layers.*.wo": 4})
    )
    assert found.scaled == ()
    assert sentences(found) == [
        "alert: +3 all_gather in layers.*.wo, forward (4 -> 16 calls per step; 1 -> 4 modules call it)"
    ]


@pytest.mark.parametrize("module", ["layers.*.wo", ""])
def test_without_an_inventory_or_a_module_raw_counts_are_compared(module: str) -> None:
    call = Calls("all_gather", module)
    found = compared(Job(1, layers(4, call)), Job(2, layers(8, call)))
    assert [change.delta_calls for change in found.changes] == [16]


def test_change_on_some_ranks_names_how_many() -> None:
    step = (Calls("all_reduce", "embed"),)
    more = (*step, Calls("all_gather", "lm_head"))
    found = compared(Job(1, step), Job(2, step, of_rank={2: more, 3: more}))
    assert sentences(found) == ["alert: +1 all_gather on 2 of 4 ranks in lm_head, forward"]


def test_unequal_change_over_ranks_is_given_as_a_sum() -> None:
    step = (Calls("all_reduce", "embed"),)
    head = Job(2, step, of_rank={0: (*step, Calls("all_gather", "x")), 1: (*step, Calls("all_gather", "x", 3))})
    found = compared(Job(1, step), head)
    assert sentences(found) == ["alert: +4 all_gather summed over 2 ranks in x, forward"]


def test_layers_of_pipeline_stages_are_counted_per_rank() -> None:
    """Each rank holds two of four layers: one more call in each layer is +1 per layer, x4."""
    low, high = layers(4, REDUCE)[:2], layers(4, REDUCE)[2:]
    more = layers(4, Calls("all_gather", "layers.*.wo"))
    base = Job(1, of_rank={0: low, 1: low, 2: high, 3: high})
    head = Job(2, of_rank={0: low + more[:2], 1: low + more[:2], 2: high + more[2:], 3: high + more[2:]})
    assert sentences(compared(base, head)) == ["alert: +1 all_gather per layer (x4) in layers.*.wo, forward"]


def test_calls_that_moved_between_ranks_are_information() -> None:
    one, two = (Calls("send", "stage"),), (Calls("send", "stage", 2),)
    found = compared(Job(1, one, of_rank={0: two}), Job(2, one, of_rank={3: two}))
    assert sentences(found) == ["info: send moved between ranks in stage, forward (5 -> 5 calls per step)"]


def test_bytes_change_only_when_calls_are_equal_and_bytes_exact() -> None:
    small, large = Calls("all_reduce", "embed", 2, 1000), Calls("all_reduce", "embed", 2, 1040)
    found = compared(Job(1, (small,)), Job(2, (large,)))
    assert sentences(found) == ["info: +320 B payload per step (+4 %) of all_reduce in embed, forward"]
    assert payload_sentence(judge(found).payload) == "+320 B payload per step (+4 %): 8 kB -> 8.3 kB over all ranks"
    assert judge(found).verdict() == "changed"


@pytest.mark.parametrize(("payload", "verdict"), [(1049, "changed"), (1050, "changed"), (1051, "regression")])
def test_payload_growth_beyond_five_percent_alerts(payload: int, verdict: str) -> None:
    found = compared(
        Job(1, (Calls("all_reduce", "embed", 1, 1000),)), Job(2, (Calls("all_reduce", "embed", 1, payload),))
    )
    assert judge(found).verdict() == verdict


def test_payload_of_an_alerting_change_does_not_alert_twice() -> None:
    found = compared(Job(1, layers(4, REDUCE)), Job(2, layers(4, REDUCE, GATHER)))
    assert judge(found).payload.severity == "info"
    assert judge(found).payload.unexplained == 0


@pytest.mark.parametrize(
    ("other", "code", "message"),
    [
        (Job(2, workload="eval"), "different_workload", "The workload differs: base train, head eval."),
        (Job(2, project="b"), "different_project", "The project differs: base default, head b."),
        (Job(2, backend="nccl 2.27"), "different_environment", "backend differs: base gloo, head nccl 2.27."),
        (Job(2, world_size=2), "different_environment", "world_size differs: base 4, head 2."),
    ],
)
def test_unlike_runs_get_no_verdict_that_names_the_field(other: Job, code: str, message: str) -> None:
    found = compare(Job(1).steady(), other.steady())
    assert isinstance(found, NoVerdict)
    assert [(reason.code, reason.message) for reason in found.reasons] == [(code, message)]


def test_explicit_cause_and_root_module_read_well() -> None:
    call = Calls("reduce_scatter", "(root)", cause=Cause("P(sum)", "S(0)", False, ""))
    found = compared(Job(1), Job(2, (call, Calls("barrier"))))
    assert sentences(found) == [
        "alert: +1 reduce_scatter in the root module, forward: explicit redistribute P(sum) -> S(0)",
        "warn: +1 barrier outside of any module, forward",
    ]


calls = st.builds(
    Calls,
    kind=st.sampled_from(["all_gather", "all_reduce"]),
    module=st.sampled_from(["", "layers.0.wo", "layers.1.wo", "layers.2.wo", "lm_head"]),
    times=st.integers(1, 3),
    payload=st.sampled_from([32, 64]),
    phase=st.sampled_from(["forward", "backward"]),
    cause=st.sampled_from([None, IMPLICIT]),
    group=st.sampled_from([TP, Group("dp", 2, 2)]),
)
steps: st.SearchStrategy[Step] = st.lists(calls, max_size=6).map(tuple)
jobs = st.builds(
    Job,
    step=steps,
    of_rank=st.dictionaries(st.integers(0, 2), steps, max_size=2),
    modules=st.sampled_from([None, {"layers.*.wo": 3, "lm_head": 1}, {"layers.*.wo": 6, "lm_head": 1}]),
    world_size=st.just(3),
)


@given(jobs)
@settings(deadline=None, max_examples=60)
def test_run_compared_with_itself_has_no_change(job: Job) -> None:
    found = compared(job, job)
    assert (found.changes, found.scaled) == ((), ())


def mirrored(change: Change) -> tuple[object, ...]:
    names = {"added": "removed", "removed": "added"}
    per_rank, per_layer = change.delta_per_rank, change.delta_per_layer
    return (
        change.site,
        names.get(change.change, change.change),
        -change.delta_calls,
        None if per_rank is None else -per_rank,
        None if per_layer is None else -per_layer,
        None if change.delta_bytes is None else -change.delta_bytes,
        change.layers,
        change.ranks,
    )


def seen(change: Change) -> tuple[object, ...]:
    per = (change.delta_per_rank, change.delta_per_layer)
    return (change.site, change.change, change.delta_calls, *per, change.delta_bytes, change.layers, change.ranks)


@given(jobs, jobs)
@settings(deadline=None, max_examples=100)
def test_swapped_runs_give_the_mirrored_changes(base: Job, head: Job) -> None:
    there, back = compared(base, head), compared(head, base)
    assert [mirrored(change) for change in there.changes] == [seen(change) for change in back.changes]
    assert [mirrored(change) for change in there.scaled] == [seen(change) for change in back.scaled]


@given(jobs, jobs)
@settings(deadline=None, max_examples=100)
def test_deltas_add_up_to_the_whole_difference(base: Job, head: Job) -> None:
    found = compared(base, head)
    everything = [*found.changes, *found.scaled]
    assert sum(change.delta_calls for change in everything) == found.head.calls - found.base.calls
    in_bytes = [change.delta_bytes for change in everything]
    assert None not in in_bytes
    total = sum(change or 0 for change in in_bytes)
    assert total == (found.head.payload.exact or 0) - (found.base.payload.exact or 0)
