"""``commwatch doctor`` and ``commwatch upload`` against a real service."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commwatch.agent.cli import main
from commwatch.agent.spool.reader import SpoolReader
from tests.integration.live_service import LiveService, free_port
from tests.unit.agent.forwarder.spools import make_spool


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Nothing of this shell decides, and nothing is left in the system's temporary folder."""
    for name in [name for name in os.environ if name.startswith(("COMMWATCH_", "TORCH_DEVICE_BACKEND"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COMMWATCH_SPOOL_DIR", str(tmp_path / "spool"))
    return monkeypatch


def examined(capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Exit code of ``doctor --json`` and its findings by name."""
    code = main(["doctor", "--json"])
    said = json.loads(capfd.readouterr().out)
    assert said["version"] == 1
    assert said["would_record"] == (code == 0)
    return code, {found["name"]: found for found in said["findings"]}


def bad(findings: dict[str, Any]) -> dict[str, str]:
    return {name: found["text"] for name, found in findings.items() if not found["ok"]}


def test_doctor_says_that_all_is_well(
    service: LiveService, variables: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    variables.setenv("COMMWATCH_ENDPOINT", service.endpoint)
    code, findings = examined(capfd)
    assert (code, bad(findings)) == (0, {})
    assert findings["service"]["text"] == f"{service.endpoint} answers"
    assert findings["spool"]["text"] == f"{tmp_path / 'spool'} is writable"
    assert findings["settings"]["text"] == f"level collectives, project default, sends to {service.endpoint}"
    assert findings["torch"]["text"].endswith("has what recording needs and waits for a process group")
    http = service.http_url.removeprefix("http://").rstrip("/")
    variables.setenv("COMMWATCH_ENDPOINT", http)
    code, findings = examined(capfd)
    assert (code, bad(findings)) == (1, {"service": f"{http} takes connections but speaks no gRPC"})


def test_doctor_names_the_variable_that_is_missing(
    variables: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    variables.delenv("COMMWATCH_SPOOL_DIR")
    assert main(["doctor"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert "NO  settings: neither COMMWATCH_ENDPOINT nor COMMWATCH_SPOOL_DIR is set: recording is off" in lines
    assert "    -> export COMMWATCH_ENDPOINT=127.0.0.1:8431 (and unset COMMWATCH_LEVEL)" in lines
    assert lines[-1].endswith("would NOT record and send as things are.")


def test_doctor_names_a_malformed_variable(variables: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    variables.setenv("COMMWATCH_ENDPOINT", "nowhere")
    code, findings = examined(capfd)
    sentence = "COMMWATCH_ENDPOINT is 'nowhere': expected host:port, such as 127.0.0.1:8431"
    assert (code, bad(findings)) == (1, {"settings": sentence})


def test_doctor_names_what_switches_entry_points_off(
    variables: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    variables.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    code, findings = examined(capfd)
    assert code == 1
    assert sorted(bad(findings)) == ["autoload", "torch"]
    assert findings["autoload"]["text"] == "TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches entry points off"
    assert "commwatch run" in findings["autoload"]["advice"]
    assert findings["torch"]["text"].endswith("but the agent is not armed there")


def test_doctor_names_a_dead_service_and_a_spool_that_cannot_be_written(
    variables: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    endpoint = f"127.0.0.1:{free_port()}"
    variables.setenv("COMMWATCH_ENDPOINT", endpoint)
    variables.setenv("COMMWATCH_SPOOL_DIR", str(tmp_path / "file" / "spool"))
    code, findings = examined(capfd)
    assert code == 1
    assert bad(findings) == {
        "service": f"{endpoint}: Connection refused",
        "spool": f"{tmp_path / 'file' / 'spool'}: Not a directory",
    }
    assert findings["service"]["advice"] == "commwatch serve"
    assert "COMMWATCH_SPOOL_DIR" in findings["spool"]["advice"]


def state(service: LiveService, run_id: str) -> tuple[str, list[tuple[int, str, int, int]]]:
    """State of the run, and (rank, state, steps, stored steps) of its ranks."""
    with service.client() as client:
        shown = client.show(run_id)
    ranks = [(rank["rank"], str(rank["state"]), rank["steps"], rank["stored_steps"]) for rank in shown["ranks"]]
    return str(shown["run"]["state"]), ranks


def gone_pid() -> int:
    """Id of a process that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def test_upload_delivers_what_was_left(
    service: LiveService, variables: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spool = tmp_path / "spool"
    finished = make_spool(spool, 3, run=1, pid=gone_pid())
    killed = make_spool(spool, 5, run=2, pid=gone_pid(), ending="")
    running = make_spool(spool, 2, run=3)
    runs = [SpoolReader(folder).hello.run_id for folder in (finished, killed)]
    assert main(["upload", str(spool), "--endpoint", service.endpoint]) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"[1/3] {finished}: sent",
        f"[2/3] {killed}: sent",
        f"[3/3] {running}: skipped, its rank still runs",
    ]
    assert state(service, runs[0]) == ("complete", [(0, "clean", 3, 3)])
    assert state(service, runs[1]) == ("lost", [(0, "lost", 5, 5)])
    assert [path.parent for path in sorted(spool.glob("*/*/hello.binpb"))] == [running]
    with service.client() as client:
        assert len(client.runs()["runs"]) == 2


def test_upload_does_not_disturb_the_forwarder_that_sends(
    variables: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_spool(tmp_path / "spool", 3, pid=gone_pid())
    assert SpoolReader(folder).lock()
    assert main(["upload", str(folder), "--endpoint", f"127.0.0.1:{free_port()}"]) == 4
    assert capfd.readouterr().out == f"[1/1] {folder}: left: another process sends {folder} right now\n"


def test_upload_stops_when_nobody_answers(
    variables: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = [make_spool(tmp_path / "spool", 1, run=run, pid=gone_pid()) for run in (1, 2, 3)]
    variables.setenv("COMMWATCH_DEADLINE_S", "0.3")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main(["upload", str(tmp_path / "spool"), "--endpoint", endpoint]) == 4
    assert capfd.readouterr().out.splitlines() == [
        f"[1/3] {folders[0]}: left: {endpoint} did not take everything within 0.3 s",
        "2 more are left untried; start the service, then the same command again",
    ]
    assert all(folder.is_dir() for folder in folders)


def test_upload_names_a_folder_that_is_none_and_one_that_is_damaged(
    variables: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["upload", str(tmp_path / "gone")]) == 2
    assert f"{tmp_path / 'gone'} is no folder" in capfd.readouterr().err
    assert main(["upload", str(tmp_path)]) == 0
    assert capfd.readouterr().err == f"commwatch upload: {tmp_path} holds no spool: nothing is left to send\n"
    folder = make_spool(tmp_path / "spool", 1, pid=gone_pid())
    (folder / "hello.binpb").write_bytes(b"\xff\xff")
    assert main(["upload", str(folder)]) == 4
    assert capfd.readouterr().out.startswith(f"[1/1] {folder}: left: {folder / 'hello.binpb'} is damaged: ")
