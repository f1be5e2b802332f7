"""``docs/json.md`` and the client's types name every field of every form, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest
from fastapi.testclient import TestClient

from commwatch.client import forms
from commwatch.service.domain.records import Line
from commwatch.service.store.opening import open_store
from commwatch.service.verdicts import evaluate
from commwatch.service.web import create_app
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
    yield TestClient(create_app(store, clock=lambda: NOW))
    store.close()


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
