"""``python -m commwatch.agent.forwarder [--describe] FOLDER``: started by the rank, ends by itself.

Exit codes: 0 everything is acknowledged, 3 the deadline passed and the spool is left, 4 the spool cannot be sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

from commwatch.agent.forwarder.delivery import DeadlineError, UndeliverableError
from commwatch.agent.forwarder.send import describe, send
from commwatch.agent.settings import load
from commwatch.agent.spool import names
from commwatch.agent.spool.reader import SpoolError, SpoolReader

LOG_BYTES = 256 * 1024


def main(arguments: list[str]) -> int:
    """Send the folder, or only find out the commit."""
    folder = Path(arguments[-1])
    handler = RotatingFileHandler(folder / names.LOG, maxBytes=LOG_BYTES, backupCount=1, delay=True)
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(asctime)s %(levelname)s %(message)s")
    log = logging.getLogger("commwatch.forwarder")
    try:
        reader = SpoolReader(folder)
        describe(reader, os.environ)
        if arguments[0] == "--describe":
            return 0
        asyncio.run(send(reader, load(os.environ), live=True))
    except DeadlineError as error:
        log.warning("%s; the spool is left: `commwatch upload %s`", error, folder)
        return 3
    except (UndeliverableError, SpoolError, OSError) as error:
        log.error("%s; the spool is left in %s", error, folder)  # noqa: TRY400  the message is enough
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
