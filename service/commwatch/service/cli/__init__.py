"""``commwatch``: one command line for both sides.

Imports the standard library alone: where only the agent is installed, its commands work, and every other one names
the extra to install.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version

EXIT_USAGE = 2

AGENT_COMMANDS = {
    "run": "Run a command with recording on.",
    "doctor": "Say whether this Python would record, and where it would send.",
    "upload": "Send spools that a forwarder left.",
}
SERVICE_COMMANDS = {
    "serve": "Take what ranks report, and answer questions about it.",
    "runs": "List runs, newest first.",
    "show": "Say what one run did, or print a captured step.",
    "explain": "Print the chain of causes behind a call.",
    "capture": "Ask ranks of a running run to record steps op by op.",
    "compare": "Say how two runs differ.",
    "alerts": "List unexpected changes.",
    "accept": "Make a run the baseline, with a reason.",
    "gate": "Fail when the head communicates more than the base.",
    "demo": "Show it on a real job of four ranks on this machine.",
}

_USAGE = "usage: commwatch COMMAND [OPTIONS] [ARGUMENTS]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. ``argv`` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        sys.stdout.write(_help())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        sys.stdout.write(f"commwatch {version('commwatch')}\n")
        return 0
    command = arguments[0]
    if command in AGENT_COMMANDS:
        from commwatch.agent.cli import main as agent_main

        return agent_main(arguments)
    if command in SERVICE_COMMANDS:
        return _service_command(command, arguments)
    near = get_close_matches(command, [*AGENT_COMMANDS, *SERVICE_COMMANDS], n=1)
    hint = f"Did you mean `commwatch {near[0]}`?" if near else "`commwatch --help` lists the commands."
    sys.stderr.write(f"commwatch: there is no command {command}. {hint}\n")
    return EXIT_USAGE


def _service_command(command: str, arguments: list[str]) -> int:
    try:
        importlib.import_module(f"commwatch.service.cli.{command}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "commwatch":
            raise
        sys.stderr.write(f"commwatch {command} needs the service extra: pip install 'commwatch[service]'\n")
        return EXIT_USAGE
    application = importlib.import_module("commwatch.service.cli.application")
    return int(application.run(arguments))


def _help() -> str:
    width = max(map(len, [*AGENT_COMMANDS, *SERVICE_COMMANDS]))

    def listed(commands: dict[str, str]) -> str:
        return "".join(f"  {name:<{width}}  {text}\n" for name, text in commands.items())

    return (
        f"{_USAGE}\n\n"
        "Tells which commit made a distributed PyTorch job communicate more, and why.\n\n"
        f"Beside the job:\n{listed(AGENT_COMMANDS)}\n"
        f"The service and its answers:\n{listed(SERVICE_COMMANDS)}\n"
        "options:\n  --help     This text; after a command, the command's own.\n  --version  The version.\n"
    )
