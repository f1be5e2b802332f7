from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from commwatch.agent.identity import attempt_of, new_run_id, shared_run_id

dist: Any = torch.distributed  # its stubs know no stores


def test_run_ids_are_uuids_of_version_7_that_sort_by_time() -> None:
    ids = [new_run_id(unix_ms) for unix_ms in (0, 1, 1_800_000_000_000, 1_800_000_000_001, 2**48 - 1)]
    assert ids == sorted(ids)
    assert ids[2].startswith("01a3185c-5000-7")
    for text in ids:
        parsed = uuid.UUID(text)
        assert (str(parsed), parsed.version, parsed.variant) == (text, 7, uuid.RFC_4122)


def test_run_ids_of_one_millisecond_differ() -> None:
    assert len({new_run_id(5) for _ in range(1000)}) == 1000


@pytest.mark.parametrize(("text", "attempt"), [(None, 0), ("0", 0), ("3", 3), ("", 0), ("-1", 0), ("x", 0), ("³", 0)])
def test_the_attempt_is_the_launchers_count(text: str | None, attempt: int) -> None:
    assert attempt_of({} if text is None else {"TORCHELASTIC_RESTART_COUNT": text}) == attempt


def tcp(_folder: Path) -> list[Any]:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    return [master, dist.TCPStore("127.0.0.1", master.port, is_master=False, timeout=timedelta(seconds=20))]


def in_memory(_folder: Path) -> list[Any]:
    store = dist.HashStore()
    return [store, store]


def in_file(folder: Path) -> list[Any]:
    return [dist.FileStore(str(folder / "store"), 2), dist.FileStore(str(folder / "store"), 2)]


STORES = [tcp, in_memory, in_file]


@pytest.mark.parametrize("make", STORES)
def test_ranks_agree_through_their_store_below_every_prefix(make: Callable[[Path], list[Any]], tmp_path: Path) -> None:
    first, second = make(tmp_path)
    agreed, sure = shared_run_id(dist.PrefixStore("default_pg", dist.PrefixStore("attempt_0", first)), {}, "")
    assert (uuid.UUID(agreed).version, sure) == (7, True)
    assert shared_run_id(dist.PrefixStore("attempt_1", second), {}, "") == (agreed, True)
    assert shared_run_id(second, {"TORCHELASTIC_RUN_ID": "another job on this store"}, "")[0] != agreed


def test_a_configured_id_wins_in_its_canonical_form() -> None:
    given = "01938DDD000070008000000000000001"
    assert shared_run_id(None, {"SLURM_JOB_ID": "7"}, given) == ("01938ddd-0000-7000-8000-000000000001", True)


class TornStore(dist.Store):  # type: ignore[misc]
    """A store whose server is gone."""

    def compare_set(self, *_: object) -> bytes:
        raise dist.DistNetworkError("connection reset")


@pytest.mark.parametrize("store", [None, FakeStore(), TornStore()])
def test_without_a_store_the_scheduler_names_the_launch(store: Any) -> None:
    job = {"SLURM_CLUSTER_NAME": "a", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    run_id, sure = shared_run_id(store, job, "")
    assert (uuid.UUID(run_id).version, sure) == (5, True)
    assert shared_run_id(store, job, "") == (run_id, True)
    changed = [job | {name: "9"} for name in (*job, "SLURM_RESTART_COUNT")]
    assert len({run_id, *(shared_run_id(store, other, "")[0] for other in changed)}) == 5


def test_without_store_and_scheduler_nobody_is_sure() -> None:
    named = {"TORCHELASTIC_RUN_ID": "nightly", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    first, second = (shared_run_id(FakeStore(), named, "") for _ in range(2))
    assert (first[1], second[1]) == (False, False)
    assert first[0] != second[0]


def test_ranks_in_different_processes_agree(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    program = (
        "import sys, torch.distributed as dist\nfrom commwatch.agent.identity import shared_run_id\n"
        "store = dist.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False)\n"
        "print(shared_run_id(dist.PrefixStore('p', store), {}, '')[0])\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(store.port)], stdout=subprocess.PIPE) for _ in range(2)
    ]
    said = {rank.communicate(timeout=60)[0] for rank in ranks}
    assert len(said) == 1
    assert said == {f"{shared_run_id(store, {}, '')[0]}\n".encode()}
