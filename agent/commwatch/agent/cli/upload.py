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
    """0: everything was sent. 2: there is no such folder. 4: something is left."""
    environ = dict(os.environ)
    endpoint = arguments.endpoint or environ.get("COMMWATCH_ENDPOINT") or DEFAULT_ENDPOINT
    try:
        settings = replace(load({**environ, "COMMWATCH_ENDPOINT": endpoint}), heartbeat_s=0.1)
    except SettingsError as error:
        sys.stderr.write(f"commwatch upload: {error}\n")
        return 2
    folders = spools(arguments.folder)
    if not folders:
        sys.stderr.write(f"commwatch upload: {arguments.folder} holds no spool: nothing is left to send\n")
        return 0 if arguments.folder.is_dir() else 2
    left = [folder for number, folder in enumerate(folders, 1) if not _upload(folder, settings, number, len(folders))]
    return 4 if left else 0


def spools(folder: Path) -> list[Path]:
    """Folders of ranks at most two levels below, sorted."""
    patterns = (names.HELLO, f"*/{names.HELLO}", f"*/*/{names.HELLO}")
    return sorted({hello.parent for pattern in patterns for hello in folder.glob(pattern)})


def _upload(folder: Path, settings: AgentSettings, number: int, total: int) -> bool:
    from commwatch.agent.forwarder.delivery import DeadlineError, UndeliverableError
    from commwatch.agent.forwarder.send import send, still_runs

    prefix = f"[{number}/{total}] {folder}"
    try:
        reader = SpoolReader(folder)
        if still_runs(reader):
            print(f"{prefix}: skipped, its rank still runs")  # noqa: T201  a command's output
            return True
        asyncio.run(send(reader, settings, live=False))
    except (DeadlineError, UndeliverableError, SpoolError, OSError) as error:
        print(f"{prefix}: left: {error}")  # noqa: T201  a command's output
        return False
    print(f"{prefix}: sent")  # noqa: T201  a command's output
    return True
