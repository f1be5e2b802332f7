"""Run a command with recording on: the same as setting COMMWATCH_ENDPOINT before it."""

from __future__ import annotations

import argparse
import os
import sys

from commwatch.agent.settings import SettingsError, load

DEFAULT_ENDPOINT = "127.0.0.1:8431"
SWITCHES = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "COMMWATCH_LEVEL": "collectives"}
"""What each variable must be for recording to be on. torch takes every value but 1 for off."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options and the command."""
    parser.add_argument("--endpoint", metavar="HOST:PORT", help=f"the service; default: {DEFAULT_ENDPOINT}")
    parser.add_argument(
        "--spool-dir", metavar="DIR", help="where records wait; without --endpoint: record, do not send"
    )
    parser.add_argument("--project", metavar="NAME")
    parser.add_argument("--workload", metavar="NAME", help="default: the script's name")
    parser.add_argument("command_line", metavar="-- COMMAND ...", nargs=argparse.REMAINDER)


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the command."""
    command = arguments.command_line[1:] if arguments.command_line[:1] == ["--"] else arguments.command_line
    if not command:
        sys.stderr.write("commwatch run: no command: write it after --, such as commwatch run -- torchrun train.py\n")
        return 2
    environ = dict(os.environ)
    given = {"ENDPOINT": arguments.endpoint, "SPOOL_DIR": arguments.spool_dir}
    given |= {"PROJECT": arguments.project, "WORKLOAD": arguments.workload}
    environ |= {f"COMMWATCH_{name}": value for name, value in given.items() if value is not None}
    if not environ.get("COMMWATCH_ENDPOINT") and arguments.spool_dir is None:
        environ["COMMWATCH_ENDPOINT"] = DEFAULT_ENDPOINT
    try:
        load(environ)
    except SettingsError as error:
        sys.stderr.write(f"commwatch run: {error}\n")
        return 2
    for variable, on in SWITCHES.items():
        if environ.get(variable, on) != on:
            sys.stderr.write(f"commwatch run: {variable}={environ[variable]} would switch recording off: set to {on}\n")
            environ[variable] = on
    try:
        os.execvpe(command[0], command, environ)  # noqa: S606  the user's own command
    except OSError as error:
        sys.stderr.write(f"commwatch run: cannot run {command[0]}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126
