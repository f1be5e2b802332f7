"""The client over HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import cast
from urllib.parse import quote, urlsplit

import httpx

from commwatch.client import capture_forms, forms
from commwatch.client.errors import NotFoundError, RefusedError, UnreachableError

DEFAULT_URL = "http://127.0.0.1:8430"
DEFAULT_TIMEOUT_S = 30.0
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

_Parameters = dict[str, str | int | bool | None]


def default_url() -> str:
    """``COMMWATCH_URL``, else the address at which ``commwatch serve`` listens by itself."""
    return os.environ.get("COMMWATCH_URL") or DEFAULT_URL


def _on_loopback(url: str) -> bool:
    try:
        return urlsplit(url).hostname in _LOOPBACK
    except ValueError:
        return False  # The first request says what is wrong with it.


class Client:
    """Asks a service. Names of runs are ids, prefixes, branches or ``branch~n``. Methods raise ``ClientError``.

    ``timeout_s`` bounds each request. May be used from one thread at a time; a context manager closes it.
    """

    def __init__(self, url: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S, project: str = "default") -> None:
        self.url = (url or default_url()).rstrip("/")
        self.project = project
        # A proxy of the environment cannot reach this machine's own loopback.
        self._http = httpx.Client(timeout=timeout_s, trust_env=not _on_loopback(self.url))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def runs(
        self,
        *,
        workload: str | None = None,
        branch: str | None = None,
        commit: str | None = None,
        state: str | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> forms.Runs:
        """Runs, newest first. ``commit`` is a full hash; ``limit`` is at most 200."""
        found = self._get(
            "runs",
            {
                "workload": workload,
                "branch": branch,
                "commit": commit,
                "state": state,
                "limit": limit,
                "offset": offset,
            },
        )
        return cast(forms.Runs, found)

    def show(self, ref: str, *, workload: str | None = None) -> forms.Report:
        """All there is to say about one run."""
        return cast(forms.Report, self._get(f"runs/{quote(ref)}", {"workload": workload}))

    def compare(self, base: str, head: str, *, workload: str | None = None) -> forms.Comparison:
        """How two runs differ."""
        return cast(forms.Comparison, self._get("compare", {"base": base, "head": head, "workload": workload}))

    def gate(self, base: str, head: str, *, workload: str | None = None, strict: bool = False) -> forms.Gate:
        """Whether the head may pass."""
        parameters: _Parameters = {"base": base, "head": head, "workload": workload, "strict": strict}
        return cast(forms.Gate, self._get("gate", parameters))

    def alerts(self, *, state: str | None = None, run: str | None = None, limit: int = 100) -> forms.Alerts:
        """Alerts, newest first. ``limit`` is at most 500."""
        return cast(forms.Alerts, self._get("alerts", {"state": state, "run": run, "limit": limit}))

    def accept(self, ref: str, reason: str, author: str, *, workload: str | None = None) -> forms.Acceptance:
        """Make a run a baseline. The first reason stays."""
        path = f"runs/{quote(ref)}/accept"
        found = self._ask("POST", path, {"workload": workload}, {"reason": reason, "author": author})
        return cast(forms.Acceptance, found)

    def explain(self, ref: str, site: str, *, workload: str | None = None) -> capture_forms.Explanation:
        """Why the calls of one site of a run are there. ``site`` is the start of its id, or ``[kind:]module``."""
        return cast(capture_forms.Explanation, self._get("explain", {"run": ref, "site": site, "workload": workload}))

    def captures(self, ref: str, *, workload: str | None = None) -> capture_forms.Captures:
        """What was captured of a run, and what was asked for."""
        return cast(capture_forms.Captures, self._get(f"runs/{quote(ref)}/captures", {"workload": workload}))

    def capture(self, ref: str, rank: int, step: int, *, workload: str | None = None) -> capture_forms.Capture:
        """One captured step of one rank."""
        path = f"runs/{quote(ref)}/captures/{rank}/{step}"
        return cast(capture_forms.Capture, self._get(path, {"workload": workload}))

    def ask_captures(
        self, ref: str, ranks: Sequence[int], steps: int, author: str, *, workload: str | None = None
    ) -> capture_forms.CaptureRequests:
        """Ask ranks of a running run to capture their next ``steps`` steps. Answers at once."""
        body = {"ranks": list(ranks), "steps": steps, "author": author}
        found = self._ask("POST", f"runs/{quote(ref)}/captures", {"workload": workload}, body)
        return cast(capture_forms.CaptureRequests, found)

    def _get(self, path: str, parameters: _Parameters) -> dict[str, object]:
        return self._ask("GET", path, parameters, None)

    def _ask(
        self, method: str, path: str, parameters: _Parameters, body: Mapping[str, object] | None
    ) -> dict[str, object]:
        given = {name: value for name, value in parameters.items() if value is not None}
        try:
            response = self._http.request(
                method, f"{self.url}/api/v1/{path}", params={"project": self.project, **given}, json=body
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnreachableError(
                f"The service at {self.url} did not answer ({error or type(error).__name__}). "
                "Start it with `commwatch serve`, or name another with --url or COMMWATCH_URL."
            ) from error
        return self._answer(response)

    def _answer(self, response: httpx.Response) -> dict[str, object]:
        try:
            content = response.json()
        except ValueError:
            content = None
        if response.is_success and isinstance(content, dict):
            return content
        error = content.get("error") if isinstance(content, dict) else None
        code = str(error.get("code")) if isinstance(error, dict) else ""
        if not isinstance(error, dict) or response.status_code >= 500 or code == "not_found":
            said = f": {error['message']}" if isinstance(error, dict) and "message" in error else ""
            raise UnreachableError(f"{self.url} answered {response.status_code}{said} Check --url and the service.")
        kind = NotFoundError if response.status_code == 404 else RefusedError
        raise kind(code, str(error.get("message")), error.get("matches") or [], str(error.get("ref") or ""))
