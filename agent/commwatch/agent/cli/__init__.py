"""The commands that need the agent alone: ``run``, ``doctor``, ``upload``. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module

COMMANDS = {
    "run": "Run a command with recording on.",
    "doctor": "Say whether this Python would record, and where it would send.",
    "upload": "Send spools that a forwarder left.",
}


def main(argv: list[str]) -> int:
    """Run one command; ``argv[0]`` is its name. Returns the exit code: 2 for a call that is wrong."""
    parser = argparse.ArgumentParser(prog="commwatch", description="Commands of the agent.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    runners: dict[str, Callable[[argparse.Namespace], int]] = {}
    for name, summary in COMMANDS.items():
        module = import_module(f"commwatch.agent.cli.{name}")
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        runners[name] = module.run
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as end:  # argparse printed the help, or what is wrong
        return int(end.code or 0)
    return runners[arguments.command](arguments)
