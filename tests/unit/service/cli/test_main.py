"""The front door: works with the standard library alone, and lists every command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from commwatch.service.cli import AGENT_COMMANDS, SERVICE_COMMANDS, main

WITHOUT_EXTRA = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"click", "rich", "httpx", "fastapi", "sqlalchemy", "uvicorn", "pydantic"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
from commwatch.service.cli import main
sys.exit(main(sys.argv[1:]))
"""


def without_extra(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_EXTRA, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", [name for name in SERVICE_COMMANDS if name != "demo"])
def test_without_the_extra_a_command_names_it(command: str) -> None:
    done = without_extra(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"commwatch {command} needs the service extra: pip install 'commwatch[service]'\n"


def test_help_lists_every_command_without_the_extra() -> None:
    done = without_extra("--help")
    assert done.returncode == 0
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert listed == [*AGENT_COMMANDS, *SERVICE_COMMANDS, "--help", "--version"]


def test_help_and_version_import_the_standard_library_alone() -> None:
    code = "import sys; from commwatch.service.cli import main; main(['--version']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    version, modules = done.stdout.splitlines()
    assert version == "commwatch 0.1.0"
    assert not {"click", "rich", "httpx", "sqlalchemy", "torch", "grpc"} & {
        name.strip("'") for name in modules[1:-1].split(", ")
    }


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comapre"]) == 2
    assert capsys.readouterr().err == "commwatch: there is no command comapre. Did you mean `commwatch compare`?\n"
    assert main(["xyz"]) == 2
    assert capsys.readouterr().err == "commwatch: there is no command xyz. `commwatch --help` lists the commands.\n"


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: commwatch COMMAND")


@pytest.mark.parametrize("command", ["runs", "show", "explain", "capture", "compare", "alerts", "accept", "gate"])
def test_every_command_that_asks_takes_json_url_and_project(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert all(option in out for option in ("--json", "--url URL", "--project NAME"))
