"""What every command that asks the service shares: options, exit codes, and names that only git knows."""

from __future__ import annotations

import functools
import getpass
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from commwatch.client import Client, ClientError, NotFoundError, RefusedError, UnreachableError

EXIT_SAME = 0
EXIT_REGRESSION = 1
EXIT_USAGE = 2
EXIT_NO_VERDICT = 3
EXIT_INFRASTRUCTURE = 4

GIT_TIMEOUT_S = 10

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Asking:
    """How this call of a command asks: its client, its format, and the address if one was given."""

    client: Client
    as_json: bool
    url: str | None

    def answer(self, form: Mapping[str, Any], text: Callable[[], None]) -> None:
        """Print the documented JSON, or call ``text``, which prints for people."""
        if self.as_json:
            click.echo(json.dumps(form, indent=2))
        else:
            text()


def asks_service(command: Callable[..., int]) -> Callable[..., None]:
    """Add ``--json``, ``--url`` and ``--project``; pass an ``Asking``; turn errors into exit codes."""

    @click.option("--json", "as_json", is_flag=True, help="Print the documented JSON.")
    @click.option("--url", metavar="URL", help="The service. Default: COMMWATCH_URL, else http://127.0.0.1:8430.")
    @click.option(
        "--project", metavar="NAME", default="default", envvar="COMMWATCH_PROJECT", help="Project. Default: default."
    )
    @functools.wraps(command)
    def asking(as_json: bool, url: str | None, project: str, **arguments: Any) -> None:
        context = click.get_current_context()
        with Client(url, project=project) as client:
            try:
                code = command(Asking(client, as_json, url), **arguments)
            except ClientError as error:
                code = _explain(error, context.info_name or "", as_json)
        context.exit(code)

    return asking


def with_git(refs: Sequence[str], ask: Callable[..., _T]) -> _T:
    """Call ``ask(*refs)``; a name the service does not know is asked for again as the commit git calls so.

    Raises NotFoundError: ``no_run`` for a commit of the current directory's repository that never ran.
    """
    try:
        return ask(*refs)
    except NotFoundError as error:
        sha = commit_of(error.ref) if error.code == "unknown_ref" and error.ref in refs else None
        if sha is None:
            raise
        if sha == error.ref:
            message = f"The service knows no run of commit {sha[:12]}, nor of a descendant of it."
            raise NotFoundError("no_run", message, error.matches, sha) from error
        hashes = [sha if ref == error.ref else ref for ref in refs]
    # Ends: a full hash is its own commit, and is not replaced again.
    return with_git(hashes, ask)


def commit_of(ref: str) -> str | None:
    """Full hash of the commit git calls ``ref`` in the current directory; None when it calls none so."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}"]
    return _git(command)


def git_user() -> str | None:
    """``user.name`` of git, if it is set."""
    return _git(["git", "config", "--get", "user.name"])


def asker() -> str:
    """Who asks: git's user.name, else the login. Raises click.UsageError when neither is known."""
    try:
        return git_user() or getpass.getuser()
    except (KeyError, OSError) as error:
        raise click.UsageError("Nobody is known to ask: name yourself with --author NAME.") from error


def _git(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def error_form(error: ClientError) -> dict[str, object]:
    """The error as documented JSON."""
    if not isinstance(error, (NotFoundError, RefusedError)):
        return {"error": {"code": "unreachable", "message": str(error), "matches": [], "ref": None}}
    return {"error": {"code": error.code, "message": str(error), "matches": error.matches, "ref": error.ref or None}}


def _explain(error: ClientError, command: str, as_json: bool) -> int:
    answered = isinstance(error, (NotFoundError, RefusedError))
    matches = error.matches if isinstance(error, (NotFoundError, RefusedError)) else []
    if as_json:
        click.echo(json.dumps(error_form(error), indent=2))
    click.echo(f"commwatch {command}: {error}", err=True)
    if matches:
        click.echo(f"Nearest: {', '.join(matches)}", err=True)
    assert answered or isinstance(error, UnreachableError)
    return EXIT_USAGE if answered else EXIT_INFRASTRUCTURE
