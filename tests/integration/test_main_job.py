"""Real ranks, the real agent, the real service: what a job does is what the service knows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from commwatch.service.domain.records import Pattern, Shapes, StepRange
from tests.integration.live_service import LiveService, until
from tests.integration.ranks import PROGRAMS, rank_environment, run_ranks, torchrun

pytestmark = pytest.mark.ranks
LOOP = PROGRAMS / "loop.py"


def environment(service: LiveService, tmp_path: Path, **extra: str) -> dict[str, str]:
    return {"COMMWATCH_ENDPOINT": service.endpoint, "COMMWATCH_SPOOL_DIR": str(tmp_path / "spool"), **extra}


def stored_ranges(service: LiveService, run_id: str) -> dict[int, tuple[StepRange, ...]]:
    store = service.store()
    try:
        return {entry.rank: entry.ranges for entry in store.ranges(run_id)}
    finally:
        store.close()


def stored_calls(service: LiveService, run_id: str) -> dict[int, Counter[tuple[str, str, str]]]:
    """For each rank, the number of calls of all finished steps by phase, kind and module."""
    found: dict[int, Counter[tuple[str, str, str]]] = {}
    store = service.store()
    try:
        for entry in store.ranges(run_id):
            counts: Counter[tuple[str, str, str]] = Counter()
            hashes = {steps.pattern_hash for steps in entry.ranges}
            bodies = store.definitions("default", hashes)
            for steps in entry.ranges:
                pattern = bodies[steps.pattern_hash]
                assert isinstance(pattern, Pattern)
                for index in pattern.order:
                    call = pattern.calls[index]
                    counts[(call.phase, call.kind, call.module)] += steps.steps
            found[entry.rank] = counts
    finally:
        store.close()
    return found


def losses(folder: Path, rank: int) -> list[float]:
    found: list[float] = json.loads((folder / f"{rank}.json").read_text())["losses"]
    return found


def plain_losses(tmp_path: Path, **extra: str) -> list[float]:
    folder = tmp_path / "plain"
    folder.mkdir()
    run_ranks(LOOP, [str(folder)], 2, extra)
    return losses(folder, 0)


def test_one_variable_and_nothing_else(service: LiveService, tmp_path: Path) -> None:
    expected = plain_losses(tmp_path)
    run_ranks(LOOP, [str(tmp_path)], 2, environment(service, tmp_path))
    assert losses(tmp_path, 0) == expected
    run_id = service.only_run()
    with service.client() as client:
        run = client.show(run_id)["run"]
    assert (run["workload"], run["world_size"], run["steps"]) == ("loop", 2, 8)
    assert run["environment"] is not None
    assert (run["environment"]["backend"], run["environment"]["device_type"]) == ("gloo", "cpu")
    per_step = {("forward", "all_reduce", "layer"): 8, ("other", "all_reduce", ""): 16}
    assert stored_calls(service, run_id) == {0: Counter(per_step), 1: Counter(per_step)}
    for rank in range(2):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        assert facts["grpc"] is False
        assert "commwatch.agent.session" in facts["agent"]
    until(lambda: not any((tmp_path / "spool").glob("*/*")))


def test_every_rank_has_the_lines_and_shapes_of_its_calls(service: LiveService, tmp_path: Path) -> None:
    run_ranks(LOOP, [str(tmp_path)], 2, environment(service, tmp_path))
    run_id = service.only_run()
    ranges = stored_ranges(service, run_id)
    last = ranges[0][-1]
    store = service.store()
    try:
        assert last.shapes_hash is not None
        assert last.lines_hash is not None
        bodies = store.definitions("default", [last.pattern_hash, last.shapes_hash, last.lines_hash])
    finally:
        store.close()
    shapes = bodies[last.shapes_hash]
    assert isinstance(shapes, Shapes)
    sizes = [shapes.shapes[index] for index in shapes.order]
    assert [(size.inputs, size.bytes_in, size.bytes_out) for size in sizes] == [
        (((4, 8),), 128, 128),
        (((8, 8),), 256, 256),
        (((8,),), 32, 32),
    ]
    lines = [[(line.file, line.function) for line in call] for call in bodies[last.lines_hash].calls]  # type: ignore[union-attr]
    assert [call[0][1] for call in lines] == ["forward", "main"]
    assert all(call[0][0].endswith("loop.py") and not call[0][0].startswith("/") for call in lines)


def test_new_shapes_at_every_step_add_no_row_per_step(service: LiveService, tmp_path: Path) -> None:
    steps = 60
    run_ranks(LOOP, [str(tmp_path)], 2, environment(service, tmp_path, STEPS=str(steps), LENGTHS="1"))
    run_id = service.only_run()
    for ranges in stored_ranges(service, run_id).values():
        assert len(ranges) == 17
        assert sum(entry.steps for entry in ranges) == steps
        merged = ranges[-1]
        assert (merged.steps, merged.statistics_steps, merged.shapes_hash) == (44, 44, None)
        by_call = {entry.call: entry for entry in merged.statistics}
        assert (by_call[0].min, by_call[0].max) == (4 * 8 * (4 + 16), 4 * 8 * (4 + 59))
        assert by_call[0].sum == sum(4 * 8 * (4 + step) for step in range(16, 60))


@pytest.mark.parametrize(
    ("extra", "forward", "other"),
    [("reuse", 2, 2), ("caught", 2, 2), ("workers", 1, 2), ("thread", 1, 3)],
)
def test_counts_are_those_of_the_program(
    service: LiveService, tmp_path: Path, extra: str, forward: int, other: int
) -> None:
    expected = plain_losses(tmp_path, EXTRA=extra)
    run_ranks(LOOP, [str(tmp_path)], 2, environment(service, tmp_path, EXTRA=extra))
    assert losses(tmp_path, 0) == expected
    run_id = service.only_run()
    counts = {("forward", "all_reduce", "layer"): 8 * forward, ("other", "all_reduce", ""): 8 * other}
    assert stored_calls(service, run_id) == {0: Counter(counts), 1: Counter(counts)}
    store = service.store()
    try:
        assert [rank.rank for rank in store.ranks(run_id)] == [0, 1]
    finally:
        store.close()


def test_what_ddp_reduces_in_cpp_is_seen(service: LiveService, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    run_ranks(PROGRAMS / "ddp.py", [str(plain)], 2)
    run_ranks(PROGRAMS / "ddp.py", [str(tmp_path)], 2, environment(service, tmp_path))
    assert [losses(tmp_path, rank) for rank in range(2)] == [losses(plain, rank) for rank in range(2)]
    run_id = service.only_run()
    for counts in stored_calls(service, run_id).values():
        # One bucket for each step, of parameters of the whole model.
        assert counts[("backward", "all_reduce", "(root)")] == 6
        # Buffers of two element types before each forward; the second also agrees on rebuilt buckets, in two calls.
        assert counts[("forward", "broadcast", "(root)")] == 2 * 6 + 2
        assert all(phase in {"forward", "backward", "other"} for phase, _, _ in counts)


def started(command: list[str], variables: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, env=rank_environment(variables), stdout=output, stderr=output)


def test_a_killed_service_loses_and_doubles_nothing(service: LiveService, tmp_path: Path) -> None:
    gate = tmp_path / "go-on"
    variables = environment(service, tmp_path, WAIT_FILE=str(gate), STEPS="40")
    job = started(torchrun(LOOP, [str(tmp_path)], 2), variables, tmp_path / "job.log")
    until(lambda: (tmp_path / "half-0").exists() and (tmp_path / "half-1").exists())
    service.only_run("running")
    service.kill()
    gate.touch()
    assert job.wait(90) == 0, (tmp_path / "job.log").read_text()
    service.start()
    run_id = service.only_run()
    counts = {("forward", "all_reduce", "layer"): 40, ("other", "all_reduce", ""): 80}
    assert stored_calls(service, run_id) == {0: Counter(counts), 1: Counter(counts)}
    store = service.store()
    try:
        assert [(rank.steps, rank.stored_steps, rank.calls) for rank in store.ranks(run_id)] == [(40, 40, 120)] * 2
    finally:
        store.close()


def test_a_killed_rank_leaves_its_frames_and_is_named(service: LiveService, tmp_path: Path) -> None:
    variables = environment(service, tmp_path, DIE_RANK="1", STEPS="20")
    job = started(torchrun(LOOP, [str(tmp_path)], 2), variables, tmp_path / "job.log")
    assert job.wait(90) != 0
    run_id = service.only_run("lost")
    with service.client() as client:
        ranks = {rank["rank"]: rank for rank in client.show(run_id)["ranks"]}
    assert ranks[1]["state"] == "lost"
    assert (ranks[1]["steps"], ranks[1]["stored_steps"]) == (10, 10)


def test_an_elastic_restart_is_another_attempt_of_the_run(service: LiveService, tmp_path: Path) -> None:
    script = tmp_path / "restart.py"
    # The launcher's store without a backend: restarted gloo ranks may meet addresses of the attempt before.
    script.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "import torch.testing._internal.distributed.fake_pg\n"
        "store, rank, size = next(dist.rendezvous('env://'))\n"
        "dist.init_process_group('fake', store=store, rank=rank, world_size=size)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    )
    run_ranks(script, [], 2, environment(service, tmp_path), options=["--max-restarts=1", "--monitor-interval=0.1"])
    run_id = service.only_run()
    with service.client() as client:
        run = client.show(run_id)["run"]
    assert (run["attempt"], run["workload"]) == (1, "restart")


def test_commwatch_run_does_the_same_by_wrapper(service: LiveService, tmp_path: Path) -> None:
    command = torchrun(LOOP, [str(tmp_path)], 2)
    wrapper = ["run", "--endpoint", service.endpoint, "--workload", "wrapped", "--"]
    subprocess.run(
        [sys.executable, "-m", "commwatch.service.cli", *wrapper, *command],
        env=rank_environment({"COMMWATCH_SPOOL_DIR": str(tmp_path / "spool")}),
        check=True,
        capture_output=True,
        timeout=90,
    )
    run_id = service.only_run()
    with service.client() as client:
        assert client.show(run_id)["run"]["workload"] == "wrapped"


def test_a_pipeline_that_never_steps_is_one_open_step(service: LiveService, tmp_path: Path) -> None:
    run_ranks(PROGRAMS / "pipeline.py", [str(tmp_path)], 2, environment(service, tmp_path))
    assert [json.loads((tmp_path / f"{rank}.json").read_text())["equal"] for rank in range(2)] == [True, True]
    run_id = service.only_run()
    for ranges in stored_ranges(service, run_id).values():
        assert [(entry.steps, entry.unfinished) for entry in ranges] == [(0, True)]
        store = service.store()
        try:
            pattern = store.definitions("default", [ranges[0].pattern_hash])[ranges[0].pattern_hash]
        finally:
            store.close()
        assert isinstance(pattern, Pattern)
        kinds = Counter(pattern.calls[index].kind for index in pattern.order)
        # Two schedules of four micro-batches; the first also exchanges the shapes of the stages.
        assert kinds["send"] >= 8
        assert kinds["recv"] >= 8


def test_one_process_on_the_fake_store_is_a_whole_run(service: LiveService, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "import commwatch.agent\n"
        "dist.init_process_group('fake', rank=0, world_size=64, store=FakeStore())\n"
        "for _ in range(4):\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "    commwatch.agent.step()\n"
    )
    subprocess.run(
        [sys.executable, str(script)], env=rank_environment(environment(service, tmp_path)), check=True, timeout=90
    )
    run_id = service.only_run()
    with service.client() as client:
        run = client.show(run_id)["run"]
    assert (run["world_size"], run["expected_ranks"], run["steps"], run["calls"]) == (64, 1, 4, 4)
