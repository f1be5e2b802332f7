from __future__ import annotations

import os
import subprocess
import sys

import pytest

from commwatch.agent.cli import main

SHOW = "import os; print({k: v for k, v in sorted(os.environ.items()) if k.startswith('COMMWATCH') or 'AUTOLOAD' in k})"


CALL = "import sys; from commwatch.agent.cli import main; sys.exit(main(sys.argv[1:]))"


def ran(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COMMWATCH_")}
    command = [sys.executable, "-c", CALL, "run", *arguments]
    return subprocess.run(command, env={**clean, **variables}, capture_output=True, text=True, check=False)


PRINT = ["--", sys.executable, "-c", SHOW]


def test_the_command_takes_the_place_of_this_process_with_recording_on() -> None:
    finished = ran(PRINT)
    assert (finished.stdout, finished.stderr) == ("{'COMMWATCH_ENDPOINT': '127.0.0.1:8431'}\n", "")
    assert ran(["--", sys.executable, "-c", "raise SystemExit(7)"]).returncode == 7


def test_options_become_variables_and_win() -> None:
    options = ["--endpoint", "host:1", "--spool-dir", "/s", "--project", "p", "--workload", "w"]
    finished = ran([*options, *PRINT], COMMWATCH_ENDPOINT="other:2", COMMWATCH_PROJECT="q")
    assert finished.stdout == (
        "{'COMMWATCH_ENDPOINT': 'host:1', 'COMMWATCH_PROJECT': 'p', 'COMMWATCH_SPOOL_DIR': '/s', "
        "'COMMWATCH_WORKLOAD': 'w'}\n"
    )


def test_a_spool_folder_alone_records_without_sending() -> None:
    assert ran(["--spool-dir", "/s", *PRINT]).stdout == "{'COMMWATCH_SPOOL_DIR': '/s'}\n"


def test_dashes_may_be_left_out_and_the_commands_options_are_its_own() -> None:
    finished = ran(["--project", "p", "echo", "--project", "x"])
    assert finished.stdout == "--project x\n"


@pytest.mark.parametrize("off", ["0", "false"])
def test_what_would_switch_recording_off_is_said_and_undone(off: str) -> None:
    finished = ran(PRINT, TORCH_DEVICE_BACKEND_AUTOLOAD=off, COMMWATCH_LEVEL="off")
    assert finished.stderr == (
        f"commwatch run: TORCH_DEVICE_BACKEND_AUTOLOAD={off} would switch recording off: set to 1\n"
        "commwatch run: COMMWATCH_LEVEL=off would switch recording off: set to collectives\n"
    )
    assert finished.stdout == (
        "{'COMMWATCH_ENDPOINT': '127.0.0.1:8431', 'COMMWATCH_LEVEL': 'collectives', "
        "'TORCH_DEVICE_BACKEND_AUTOLOAD': '1'}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "commwatch run: no command: write it after --, such as commwatch run -- torchrun train.py\n"),
        (["--"], 2, "commwatch run: no command: write it after --, such as commwatch run -- torchrun train.py\n"),
        (
            ["--endpoint", "nowhere", "--", "true"],
            2,
            "commwatch run: COMMWATCH_ENDPOINT is 'nowhere': expected host:port, such as 127.0.0.1:8431\n",
        ),
        (["--", "/no/such"], 127, "commwatch run: cannot run /no/such: No such file or directory\n"),
        (["--", "/"], 126, "commwatch run: cannot run /: Permission denied\n"),
    ],
)
def test_what_cannot_run_is_named(
    arguments: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("COMMWATCH_")]:
        monkeypatch.delenv(name)
    assert main(["run", *arguments]) == code
    assert capfd.readouterr().err == said


@pytest.mark.parametrize("arguments", [["upload"], ["run", "--endpoint"], ["doctor", "--no-such"], ["nothing"], []])
def test_a_wrong_call_is_2_with_the_usage(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capfd.readouterr().err
    assert said.startswith("usage: commwatch")
    assert "error: " in said


@pytest.mark.parametrize("command", ["run", "doctor", "upload"])
def test_help_is_0(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert capfd.readouterr().out.startswith(f"usage: commwatch {command} ")
