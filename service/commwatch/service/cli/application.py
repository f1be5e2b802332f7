"""The commands that need the service extra, as one click group."""

from __future__ import annotations

import importlib
import sys

import click

from commwatch.service.cli import SERVICE_COMMANDS


class LazyGroup(click.Group):
    """Imports a command's module when the command is used: ``commwatch runs`` never loads the server."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, in the order of the help text."""
        del ctx
        return list(SERVICE_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, from the module and attribute of its name."""
        del ctx
        if cmd_name not in SERVICE_COMMANDS:
            return None
        found = getattr(importlib.import_module(f"commwatch.service.cli.{cmd_name}"), cmd_name)
        assert isinstance(found, click.Command)
        return found


@click.group(cls=LazyGroup)
def app() -> None:
    """Tells which commit made a distributed PyTorch job communicate more, and why."""


def run(arguments: list[str]) -> int:
    """Run one command; returns its exit code, 2 for wrong usage."""
    try:
        app.main(arguments, prog_name="commwatch", standalone_mode=True)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
            return 1
        return ended.code or 0
    return 0
