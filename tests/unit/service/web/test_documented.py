"""``docs/json.md`` and the client's types name every field of every form, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest
from fastapi.testclient import TestClient

from commwatch.client import capture_forms, forms
from commwatch.service.domain.captures import Capture
from commwatch.service.domain.records import Completeness, Frame, Line, Progress, RankKey
from commwatch.service.store.contract import Store, StreamWrite
from commwatch.service.store.opening import open_store
from commwatch.service.verdicts import evaluate
from commwatch.service.web import create_app
from tests.contract.samples import capture, completeness
from tests.unit.service.domain.jobs import IMPLICIT, NOW, Calls, Job, layers

DOCUMENT = Path(__file__).parents[4] / "docs" / "json.md"
GOOD = layers(2, Calls("all_reduce", "layers.*.wo", 2, 1024))
GATHER = Calls("all_gather", "layers.*.wo", cause=IMPLICIT, line=Line("model.py", 88, "forward"))
SCALED = Calls("all_reduce", "blocks.*")

Form = Mapping[str, object]


def documented(section: str) -> set[str]:
    """Fields of the first column of a section's table."""
    found = re.search(rf"^## {section}$(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, section
    rows = re.findall(r"^\| (`.*?) \|", found[1], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('db') / 'commwatch.db'}", migrate=True)
    warm_up = (Calls("broadcast"),)
    base = Job(1, (*GOOD, *layers(2, SCALED)), warm_up=warm_up, commit=7, modules={"blocks.*": 2, "layers.*.wo": 2})
    head = Job(2, (*GOOD, *layers(4, SCALED), *layers(2, GATHER)), commit=8, modules={"blocks.*": 4, "layers.*.wo": 2})
    base.feed(store)
    head.feed(store)
    evaluate(store, head.id, NOW)
    _capture(store, head)
    odd = Job(3, GOOD, commit=9, branch="odd")
    odd.feed(store)
    _say_all(store, odd)
    yield TestClient(create_app(store, clock=lambda: NOW))
    store.close()


def _capture(store: Store, job: Job) -> None:
    """A captured step that a request asked for."""
    store.ask_captures(job.id, [0], 1, "Ada", NOW)
    _send(store, job, capture(5, request=1))


def _say_all(store: Store, job: Job) -> None:
    """Everything a rank may say about completeness and cost."""
    last = Progress(1, 10, 10, 10, 0, 0, 0, "", 10, 1, 0, 5, 90)
    _send(store, job, completeness(8, 10, 5, graph_calls=3), last)


def _send(store: Store, job: Job, content: Capture | Completeness, last: Progress | None = None) -> None:
    (rank,) = [rank for rank in store.ranks(job.id) if rank.rank == 0]
    frame = Frame(rank.acked_frame + 1, content)
    store.apply([StreamWrite(RankKey(job.id, 0, 0), job.project, [frame], progress=last)], NOW)


def get(api: TestClient, path: str) -> Form:
    response = api.get(f"/api/v1/{path}")
    assert response.status_code == 200
    return cast(Form, response.json())


def first(form: Form, *path: str) -> Form:
    """Walk into a form; of a list, its first element."""
    found: object = form
    for name in path:
        found = cast(Form, found)[name]
        if isinstance(found, list):
            found = found[0]
    return cast(Form, found)


GATE = "gate?base=main~1&head=main"
CAPTURE = "runs/main/captures/0/5"


@pytest.mark.parametrize(
    ("path", "into", "sections", "typed"),
    [
        ("runs", (), ["Runs"], forms.Runs),
        ("runs/main", ("run",), ["Run"], forms.Run),
        ("runs/main", ("run", "environment"), ["Environment"], forms.Environment),
        ("runs/main", (), ["Report"], forms.Report),
        ("runs/main", ("ranks",), ["Rank"], forms.Rank),
        ("runs/main", ("steady",), ["Steady"], forms.Steady),
        ("runs/main", ("steady", "sites"), ["Site", "Steady site"], forms.SteadySite),
        ("runs/main", ("steady", "payload"), ["Bytes"], forms.Bytes),
        ("runs/main~1", ("steady", "left_out"), ["Left out"], forms.LeftOut),
        ("compare?base=main~1&head=main", (), ["Comparison"], forms.Comparison),
        ("gate?base=main~4&head=main", ("reasons",), ["Reason"], forms.Reason),
        (GATE, (), ["Comparison", "Gate"], forms.Gate),
        (GATE, ("changes",), ["Site", "Change"], forms.Change),
        (GATE, ("payload",), ["Payload"], forms.Payload),
        ("runs/odd", (), ["Report"], forms.Report),
        ("runs/odd", ("ranks",), ["Rank"], forms.Rank),
        ("runs/odd", ("ranks", "completeness"), ["Rank completeness"], forms.RankCompleteness),
        ("runs/odd", ("completeness",), ["Completeness"], forms.Completeness),
        ("runs/odd", ("cost",), ["Cost"], forms.Cost),
        ("explain?run=main&site=all_gather:*", (), ["Explanation"], capture_forms.Explanation),
        ("explain?run=main&site=all_gather:*", ("path",), ["Path"], capture_forms.Path),
        ("runs/main/captures", (), ["Captures"], capture_forms.Captures),
        ("runs/main/captures", ("captures",), ["Capture summary"], capture_forms.CaptureSummary),
        ("runs/main/captures", ("requests",), ["Request"], capture_forms.CaptureRequest),
        (CAPTURE, (), ["Capture"], capture_forms.Capture),
        (CAPTURE, ("calls",), ["Captured call"], capture_forms.CapturedCall),
        (CAPTURE, ("records",), ["Captured record"], capture_forms.CapturedRecord),
        ("alerts", (), ["Alerts"], forms.Alerts),
        ("alerts", ("alerts",), ["Alert"], forms.Alert),
    ],
)
def test_every_field_is_documented_and_typed(
    api: TestClient, path: str, into: tuple[str, ...], sections: list[str], typed: type
) -> None:
    fields = set(first(get(api, path), *into))
    assert fields == _fields(typed)
    in_words = {name for section in sections for name in documented(section)}
    assert fields <= in_words
    # Words in code in the first column are fields of the form, or of what is in it.
    assert in_words - fields == set()


@pytest.mark.parametrize(
    ("path", "into", "typed"),
    [
        ("runs/main", ("captured",), forms.CapturedAt),
        ("runs/odd", ("ranks", "completeness", "groups"), forms.GroupCompleteness),
        ("runs/odd", ("completeness", "unverified"), forms.Unverified),
        ("runs/odd", ("completeness", "different"), forms.GroupDifference),
        ("runs/odd", ("completeness", "unequal"), forms.UnequalSteps),
        ("runs/odd", ("completeness", "graphs"), forms.GraphCalls),
        ("runs/odd", ("cost", "ns_per_step"), forms.Fraction),
        ("explain?run=main&site=all_gather:*", ("chain",), capture_forms.Link),
        ("explain?run=main&site=all_gather:*", ("path", "records"), capture_forms.PathRecord),
        (CAPTURE, ("lines",), forms.Line),
    ],
)
def test_parts_of_forms_are_typed(api: TestClient, path: str, into: tuple[str, ...], typed: type) -> None:
    assert set(first(get(api, path), *into)) == _fields(typed)


def test_parts_of_captured_calls_are_typed(api: TestClient) -> None:
    calls = cast("list[capture_forms.CapturedCall]", get(api, CAPTURE)["calls"])
    redistribute, collective, tensor = calls[2]["redistribute"], calls[4]["collectives"][0], calls[1]["arguments"][0]
    assert redistribute is not None
    assert set(redistribute) == _fields(capture_forms.CapturedRedistribute)
    assert set(collective) == _fields(capture_forms.CapturedCollective)
    assert set(tensor) == {"name", "tensor"}
    assert set(tensor["tensor"]) == _fields(capture_forms.CapturedTensor)
    assert set(calls[4]["arguments"][1]) == {"name", "text"}


def test_what_was_asked_is_documented(api: TestClient) -> None:
    form = api.post("/api/v1/runs/odd/captures", json={"ranks": [0, 1], "author": "Ada"}).json()
    assert set(form) == documented("Asked") == _fields(capture_forms.CaptureRequests)
    assert [set(request) for request in form["requests"]] == [documented("Request")] * 2
    assert [(request["number"], request["rank"], request["steps"]) for request in form["requests"]] == [
        (1, 0, 1),
        (1, 1, 1),
    ]


def test_scaled_sites_are_changes_without_severity(api: TestClient) -> None:
    form = get(api, GATE)
    assert set(first(form, "scaled")) == set(first(form, "changes")) - {"severity"}


def test_listed_runs_add_calls_per_step(api: TestClient) -> None:
    form = get(api, "runs")
    assert set(first(form, "runs")) == documented("Run") | {"calls_per_step"}


def test_acceptance_is_documented(api: TestClient) -> None:
    body = {"reason": "wanted", "author": "Ada"}
    form = api.post("/api/v1/runs/main/accept", json=body).json()
    assert set(form) == documented("Acceptance") == _fields(forms.Acceptance)
    assert set(form["run"]["accepted"]) == {"reason", "author", "unix_ns"} == _fields(forms.Accepted)
    assert set(form["accepted_alerts"][0]) == documented("Alert")
    assert form["accepted_alerts"][0]["events"][-1] == {
        "unix_ns": NOW,
        "from": "open",
        "to": "accepted",
        "author": "Ada",
        "reason": "wanted",
    }


def test_errors_are_documented(api: TestClient) -> None:
    form = api.get("/api/v1/runs/nothing").json()
    assert {f"error.{name}" for name in form["error"]} == documented("Error")


def _fields(typed: type) -> set[str]:
    """Of a TypedDict, inherited ones included."""
    required: frozenset[str] = typed.__required_keys__  # type: ignore[attr-defined]  # not part of type's stub
    return set(required)
