"""The client against real sockets that answer in the ways a service can."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from commwatch.client import DEFAULT_URL, Client, ClientError, NotFoundError, RefusedError, UnreachableError


@contextmanager
def answering(status: int, body: str) -> Iterator[tuple[str, list[str]]]:
    """A server that gives everyone the same answer; the URL and the paths it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is http.server's
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def error(code: str) -> str:
    return json.dumps({"error": {"code": code, "message": "It is so.", "matches": ["main"], "ref": "mian"}})


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(404, "unknown_ref", NotFoundError), (404, "no_run", NotFoundError), (422, "ambiguous_ref", RefusedError)],
)
def test_refusal_carries_code_message_and_matches(status: int, code: str, kind: type[ClientError]) -> None:
    with answering(status, error(code)) as (url, _), Client(url) as client:
        with pytest.raises(kind, match="It is so") as raised:
            client.show("mian")
        assert isinstance(raised.value, (NotFoundError, RefusedError))
        assert (raised.value.code, raised.value.matches, raised.value.ref) == (code, ["main"], "mian")


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, "<html>"), (200, "[]"), (404, "{}"), (404, error("not_found")), (503, error("x")), (500, "")],
)
def test_other_answers_are_unreachable(status: int, body: str) -> None:
    answered = pytest.raises(UnreachableError, match=f"answered {status}")
    with answering(status, body) as (url, _), Client(url) as client, answered:
        client.runs()


def test_names_are_quoted_and_the_project_is_always_given() -> None:
    with answering(200, "{}") as (url, asked), Client(f"{url}/", project="a b") as client:
        client.show("feature/x?y#z")
        client.gate("main~1", "main", strict=True)
    assert asked == [
        "/api/v1/runs/feature/x%3Fy%23z?project=a+b",
        "/api/v1/gate?project=a+b&base=main~1&head=main&strict=true",
    ]


def test_url_comes_from_the_argument_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMWATCH_URL", raising=False)
    assert Client().url == DEFAULT_URL == "http://127.0.0.1:8430"
    monkeypatch.setenv("COMMWATCH_URL", "http://watch:1/")
    assert (Client().url, Client("http://other").url) == ("http://watch:1", "http://other")


@pytest.mark.parametrize("url", ["nonsense", "http://", "ftp://x", "http://[", "http://127.0.0.1:99999"])
def test_malformed_url_is_unreachable(url: str) -> None:
    with pytest.raises(UnreachableError, match="did not answer"), Client(url) as client:
        client.runs()


def test_loopback_is_asked_directly_whatever_proxy_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with answering(200, '{"version": 1, "runs": [], "next_offset": null}') as (url, _), Client(url) as client:
        assert client.runs()["runs"] == []
