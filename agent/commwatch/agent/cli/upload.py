"""Send spools that a forwarder left: the service was away for longer than COMMWATCH_DEADLINE_S, or never named."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

from commwatch.agent.cli.run import DEFAULT_ENDPOINT
from commwatch.agent.settings import AgentSettings, SettingsError, load
from commwatch.agent.spool import names
from commwatch.agent.spool.reader import SpoolError, SpoolReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options and the folder."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="a rank's folder, a run's, or a whole spool folder")
    parser.add_argument("--endpoint", metavar="HOST:PORT", help=f"the service; default: {DEFAULT_ENDPOINT}")


def run(arguments: argparse.Namespace) -> int:
    """0: everything was sent, or its rank still runs. 2: the call is wrong. 4: something is left."""
    environ = dict(os.environ)
    endpoint = arguments.endpoint or environ.get("COMMWATCH_ENDPOINT") or DEFAULT_ENDPOINT
    try:
        settings = replace(load({**environ, "COMMWATCH_ENDPOINT": endpoint}), heartbeat_s=0.1)
    except SettingsError as error:
        sys.stderr.write(f"commwatch upload: {error}\n")
        return 2
    if not arguments.folder.is_dir():
        sys.stderr.write(f"commwatch upload: {arguments.folder} is no folder: `commwatch doctor` names it\n")
        return 2
    folders = spools(arguments.folder)
    if not folders:
        sys.stderr.write(f"commwatch upload: {arguments.folder} holds no spool: nothing is left to send\n")
        return 0
    return _upload_all(folders, settings)


def spools(folder: Path) -> list[Path]:
    """Folders of ranks at most two levels below, sorted."""
    patterns = (names.HELLO, f"*/{names.HELLO}", f"*/*/{names.HELLO}")
    return sorted({hello.parent for pattern in patterns for hello in folder.glob(pattern)})


def _upload_all(folders: list[Path], settings: AgentSettings) -> int:
    from commwatch.agent.forwarder.delivery import DeadlineError

    left = 0
    for number, folder in enumerate(folders, 1):
        prefix = f"[{number}/{len(folders)}] {folder}"
        try:
            outcome, sent = _upload(folder, settings)
        except DeadlineError as error:  # the next would wait as long for nothing
            _say(f"{prefix}: left: {error}")
            if number < len(folders):
                _say(f"{len(folders) - number} more are left untried; start the service, then the same command again")
            return 4
        left += not sent
        _say(f"{prefix}: {outcome}")
    return 4 if left else 0


def _upload(folder: Path, settings: AgentSettings) -> tuple[str, bool]:
    """(what happened, whether nothing of it is left to do). Raises DeadlineError."""
    from commwatch.agent.forwarder.send import send, still_runs
    from commwatch.agent.forwarder.stream import UndeliverableError

    try:
        reader = SpoolReader(folder)
        if still_runs(reader):
            return "skipped, its rank still runs", True
        asyncio.run(send(reader, settings, live=False))
    except (UndeliverableError, SpoolError, OSError) as error:
        return f"left: {error}", False
    return "sent", True


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  a command's output
