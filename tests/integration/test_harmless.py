"""What may go wrong with the agent costs one log line, and the job nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.live_service import free_port
from tests.integration.ranks import PROGRAMS, rank_environment, run_ranks

UNTOUCHED = """
import json, sys
import torch, torch.distributed as dist
from torch.nn.modules import module as hooks
from torch.optim import optimizer
print(json.dumps({
    "creation": dist.distributed_c10d._new_process_group_helper.__module__,
    "wrapped": hasattr(dist.distributed_c10d._new_process_group_helper, "__wrapped__"),
    "kernels": [
        name for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("c10d::") and "commwatch" in torch._C._dispatch_dump(name)
    ],
    "hooks": len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks),
    "optimizer": len(optimizer._global_optimizer_post_hooks),
    "mesh": hasattr(dist.device_mesh.DeviceMesh.__init__, "__wrapped__"),
    "agent": sorted(name for name in sys.modules if name.startswith("commwatch.agent.")),
    "protobuf": "google.protobuf" in sys.modules,
}))
"""


def look(variables: Mapping[str, str], program: str = UNTOUCHED) -> tuple[dict[str, object], str]:
    """What the program printed, and its standard error."""
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env=rank_environment(variables),
        capture_output=True,
        text=True,
        check=True,
        timeout=90,
    )
    return json.loads(finished.stdout), finished.stderr


def test_without_the_variable_nothing_is_installed() -> None:
    found, errors = look({})
    assert found == {
        "creation": "torch.distributed.distributed_c10d",
        "wrapped": False,
        "kernels": [],
        "hooks": 0,
        "optimizer": 0,
        "mesh": False,
        "agent": ["commwatch.agent.autoload"],
        "protobuf": False,
    }
    assert errors == ""


def test_a_process_without_a_group_sees_no_hook_and_no_line(tmp_path: Path) -> None:
    found, errors = look({"COMMWATCH_ENDPOINT": "not an endpoint", "COMMWATCH_SPOOL_DIR": str(tmp_path)})
    assert (found["kernels"], found["hooks"], found["optimizer"], found["mesh"]) == ([], 0, 0, False)
    assert found["protobuf"] is False
    assert errors == ""
    assert list(tmp_path.iterdir()) == []


def lines_about_commwatch(text: str) -> list[str]:
    return [line for line in text.splitlines() if "commwatch:" in line]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"COMMWATCH_ENDPOINT": "nonsense"}, "COMMWATCH_ENDPOINT"),
        ({"COMMWATCH_ENDPOINT": "127.0.0.1:1", "COMMWATCH_SPOOL_DIR": "/proc/commwatch"}, "COMMWATCH_SPOOL_DIR"),
    ],
)
def test_a_setting_that_cannot_work_costs_one_line(tmp_path: Path, variables: dict[str, str], expected: str) -> None:
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    plain.mkdir()
    watched.mkdir()
    run_ranks(PROGRAMS / "loop.py", [str(plain)], 1)
    finished = run_ranks(PROGRAMS / "loop.py", [str(watched)], 1, variables)
    lines = lines_about_commwatch(finished.stderr)
    assert len(lines) == 1
    assert "not recording" in lines[0]
    assert expected in lines[0]
    first, second = (json.loads((folder / "0.json").read_text()) for folder in (plain, watched))
    assert first["losses"] == second["losses"]


@pytest.mark.ranks
def test_a_service_that_is_not_there_costs_nothing(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    variables = {
        "COMMWATCH_ENDPOINT": f"127.0.0.1:{free_port()}",
        "COMMWATCH_SPOOL_DIR": str(spool),
        "COMMWATCH_DEADLINE_S": "1",
    }
    finished = run_ranks(PROGRAMS / "loop.py", [str(tmp_path)], 2, variables)
    assert lines_about_commwatch(finished.stderr) == []
    assert sorted(folder.name for folder in spool.glob("*/*")) == ["0-0", "0-1"]


@pytest.mark.ranks
def test_a_torch_without_what_recording_needs_costs_one_line(tmp_path: Path) -> None:
    program = tmp_path / "old_torch.py"
    program.write_text(
        "import torch\n"
        "del torch._C._dispatch_get_all_op_names\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "__import__('time').sleep(0.3)  # gloo's threads drop their last tensors\n"
        "dist.destroy_process_group()\n"
    )
    variables = {"COMMWATCH_ENDPOINT": "127.0.0.1:1", "COMMWATCH_SPOOL_DIR": str(tmp_path / "spool")}
    finished = run_ranks(program, [], 1, variables)
    (line,) = lines_about_commwatch(finished.stderr)
    assert "this torch lacks torch._C._dispatch_get_all_op_names" in line
    assert not (tmp_path / "spool").exists()


@pytest.mark.ranks
def test_a_torch_without_a_part_of_it_records_less_and_says_so_once(tmp_path: Path) -> None:
    program = tmp_path / "other_torch.py"
    program.write_text(
        "import torch\n"
        "del torch._C._autograd._get_sequence_nr\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "__import__('time').sleep(0.3)  # gloo's threads drop their last tensors\n"
        "dist.destroy_process_group()\n"
    )
    variables = {"COMMWATCH_SPOOL_DIR": str(tmp_path / "spool")}
    finished = run_ranks(program, [], 1, variables)
    (line,) = lines_about_commwatch(finished.stderr)
    assert "without torch._C._autograd._get_sequence_nr collectives in backward have no module" in line
    assert len(list((tmp_path / "spool").glob("*/0-0/*"))) > 0


@pytest.mark.ranks
def test_an_error_in_the_recorder_switches_it_off_and_leaves_the_job_alone(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "from commwatch.agent.recorder.observer import Observer\n"
        "Observer.observe = None\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "for _ in range(3):\n"
        "    dist.all_reduce(total)\n"
        "assert float(total) == 1.0\n"
        "print('job done')\n"
        "__import__('time').sleep(0.3)  # gloo's threads drop their last tensors\n"
        "dist.destroy_process_group()\n"
    )
    variables = {"COMMWATCH_SPOOL_DIR": str(tmp_path / "spool")}
    finished = run_ranks(program, [], 1, variables)
    (line,) = lines_about_commwatch(finished.stderr)
    assert "recorder switched off: TypeError" in line
    assert "job done" in finished.stdout
