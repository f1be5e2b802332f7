"""``python -m commwatch.agent.forwarder [--describe] FOLDER``: started by the rank, ends by itself.

Exit codes: 0 everything is acknowledged, 2 the call or a setting is wrong, 3 the deadline passed and the spool is left,
4 the spool cannot be sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path

from commwatch.agent.forwarder.delivery import DeadlineError
from commwatch.agent.forwarder.send import describe, send
from commwatch.agent.forwarder.stream import UndeliverableError
from commwatch.agent.settings import SettingsError, load
from commwatch.agent.spool import names
from commwatch.agent.spool.reader import SpoolError, SpoolReader

LOG_BYTES = 256 * 1024

_log = logging.getLogger("commwatch.forwarder")


def main(arguments: list[str]) -> int:
    """Send the folder, or only find out the commit."""
    describe_only = arguments[:1] == ["--describe"]
    if len(arguments) != 1 + describe_only:
        sys.stderr.write("usage: python -m commwatch.agent.forwarder [--describe] FOLDER\n")
        return 2
    folder = Path(arguments[-1])
    if not folder.is_dir():
        sys.stderr.write(f"{folder} is no folder: `commwatch upload DIR` sends a spool\n")
        return 4
    handler = RotatingFileHandler(folder / names.LOG, maxBytes=LOG_BYTES, backupCount=1, delay=True)
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(asctime)s %(levelname)s %(message)s")
    try:
        return _forward(folder, describe_only=describe_only)
    except Exception:  # noqa: BLE001  nobody sees the output of this process: its log has to say it
        _log.exception("this should not happen; the spool is left: `commwatch upload %s`", folder)
        return 1


def _forward(folder: Path, *, describe_only: bool) -> int:
    began = time.monotonic()
    try:
        reader = SpoolReader(folder)
        settings = load(os.environ)
        describe(reader, os.environ)
        if describe_only:
            return 0
        # A rank that ended meanwhile is taken to have ended at once: this process is to be gone by the deadline.
        gone_s = time.monotonic() - began if reader.process.ended() else 0.0
        asyncio.run(send(reader, settings, live=True, gone_s=gone_s))
    except SettingsError as error:
        _log.error("%s", error)
        return 2
    except DeadlineError as error:
        _log.warning("%s; the spool is left: `commwatch upload %s`", error, folder)
        return 3
    except (UndeliverableError, SpoolError, OSError) as error:
        _log.error("%s; the spool is left in %s", error, folder)
        return 4
    return 0


if __name__ == "__main__":
    for early in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # meant for the job: `send` decides what they mean
        signal.signal(early, signal.SIG_IGN)
    sys.exit(main(sys.argv[1:]))
