"""The API's limits and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from commwatch.service.store.contract import Store
from commwatch.service.store.opening import open_store
from commwatch.service.web import create_app
from tests.unit.service.domain.jobs import Calls, Job, run_id, sha

STEP = (Calls("all_reduce", "embed"),)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'commwatch.db'}", migrate=True)
    yield opened
    opened.close()


@pytest.fixture
def api(store: Store) -> TestClient:
    return TestClient(create_app(store))


def test_pages_of_runs_follow_each_other(store: Store, api: TestClient) -> None:
    for number in range(1, 6):
        Job(number, STEP, world_size=1).feed(store)
    pages = []
    offset: int | None = 0
    while offset is not None:
        form = api.get("/api/v1/runs", params={"limit": 2, "offset": offset}).json()
        pages.append([run["id"] for run in form["runs"]])
        offset = form["next_offset"]
    assert pages == [[run_id(5), run_id(4)], [run_id(3), run_id(2)], [run_id(1)]]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("runs?limit=0", "limit: Input should be greater than or equal to 1"),
        ("runs?limit=201", "limit: Input should be less than or equal to 200"),
        ("runs?offset=-1", "offset: Input should be greater than or equal to 0"),
        ("runs?state=odd", "state: Input should be 'running', 'complete' or 'lost'"),
        ("alerts?limit=501", "limit: Input should be less than or equal to 500"),
        ("compare?base=a", "head: Field required"),
        ("runs/main/captures/-1/3", "rank: Input should be greater than or equal to 0"),
        ("runs/main/captures/0/0", "step: Input should be greater than or equal to 1"),
        ("runs/main/captures/x/1", "rank: Input should be a valid integer, unable to parse string as an integer"),
        ("explain?run=main", "site: Field required"),
        ("gate?base=a&head=b&strict=perhaps", "strict: Input should be a valid boolean, unable to interpret input"),
    ],
)
def test_values_out_of_their_limits_are_422(api: TestClient, path: str, message: str) -> None:
    response = api.get(f"/api/v1/{path}")
    assert response.status_code == 422
    assert response.json() == {"error": {"code": "invalid_request", "message": message, "matches": [], "ref": None}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"ranks": []}, "ranks: List should have at least 1 item after validation, not 0"),
        ({"ranks": list(range(65))}, "ranks: List should have at most 64 items after validation, not 65"),
        ({"ranks": [-1]}, "ranks.0: Input should be greater than or equal to 0"),
        ({"ranks": [2**31]}, f"ranks.0: Input should be less than or equal to {2**31 - 1}"),
        ({"steps": 0}, "steps: Input should be greater than or equal to 1"),
        ({"steps": 17}, "steps: Input should be less than or equal to 16"),
        ({"author": " "}, "author: String should have at least 1 character"),
        ({"level": "ops"}, "level: Extra inputs are not permitted"),
    ],
)
def test_what_is_asked_for_has_limits(store: Store, api: TestClient, body: dict[str, object], message: str) -> None:
    run = Job(1, STEP, world_size=1).feed(store)
    response = api.post("/api/v1/runs/main/captures", json={"ranks": [0], "author": "Ada", **body})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")
    assert response.json()["error"]["message"] == message
    assert store.capture_requests(run.id) == []


def test_a_branch_that_ends_in_captures_is_still_shown(store: Store, api: TestClient) -> None:
    Job(1, STEP, branch="fix/captures").feed(store)
    assert api.get("/api/v1/runs/fix/captures").json()["run"]["id"] == run_id(1)
    assert api.get("/api/v1/runs/fix/captures/captures").json()["captures"] == []
    error = api.get("/api/v1/runs/mian/captures").json()["error"]
    assert (error["code"], error["ref"]) == ("unknown_ref", "mian")


def test_unknown_name_is_404_and_known_commit_without_a_run_too(store: Store, api: TestClient) -> None:
    Job(1, STEP).feed(store)
    response = api.get("/api/v1/runs/mian")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_ref")
    response = api.get(f"/api/v1/runs/{sha(3)}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "no_run")


def test_unknown_path_is_404_in_the_same_form(api: TestClient) -> None:
    response = api.get("/api/v2/runs")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "code": "not_found",
        "message": "Not Found. The API is below /api/v1.",
        "matches": [],
        "ref": None,
    }


def test_branch_names_with_slashes_are_paths(store: Store, api: TestClient) -> None:
    Job(1, STEP, branch="feature/accept").feed(store)
    assert api.get("/api/v1/runs/feature/accept").json()["run"]["id"] == run_id(1)
    body = {"reason": "wanted", "author": "Ada"}
    assert api.post("/api/v1/runs/feature/accept/accept", json=body).json()["run"]["id"] == run_id(1)


def test_health_says_alive_and_ready(api: TestClient) -> None:
    assert api.get("/healthz").json() == {"status": "ok"}
    assert api.get("/readyz").json() == {"status": "ready"}


def test_unanswering_database_is_503_but_alive(tmp_path: Path) -> None:
    path = tmp_path / "commwatch.db"
    store = open_store(f"sqlite:///{path}", migrate=True)
    api = TestClient(create_app(store))
    store.close()
    for leftover in tmp_path.iterdir():
        leftover.unlink()
    path.mkdir()
    response = api.get("/readyz")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "store_unavailable")
    assert api.get("/api/v1/runs").status_code == 503
    assert api.get("/healthz").status_code == 200
