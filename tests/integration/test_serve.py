"""``commwatch serve`` as a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from commwatch.service.settings import Settings, markdown_rows
from commwatch.service.store.contract import Store
from commwatch.service.store.opening import open_store
from commwatch.v1 import ingest_pb2
from tests.contract.agents import Agent
from tests.contract.samples import SECOND, run_id
from tests.contract.samples import hello as stored_hello
from tests.contract.wire_samples import L, M, P, S, capture, facts, frames, goodbye, progress, step_range

DEADLINE_S = 40.0
ALL = ingest_pb2.DefinitionBatch(definitions=[P, S, L, M])
READY = re.compile(
    r"^commwatch ready: http (http://127\.0\.0\.1:(\d+))  grpc 127\.0\.0\.1:(\d+)  db (sqlite:///\S+)\n$"
)
COMMAND = [sys.executable, "-c", "import sys; from commwatch.service.cli import main; sys.exit(main())", "serve"]


@dataclass
class Served:
    """A running service."""

    process: subprocess.Popen[str]
    http: str
    grpc_port: int
    db: str

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


class Starter:
    """Starts services whose data directory, ports and environment are the test's own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def spawn(self, *args: str, **environ: str) -> subprocess.Popen[str]:
        mine = {name: value for name, value in os.environ.items() if not name.startswith("COMMWATCH_")}
        ports = {"COMMWATCH_GRPC_LISTEN": "127.0.0.1:0", "COMMWATCH_HTTP_LISTEN": "127.0.0.1:0"}
        process = subprocess.Popen(
            [*COMMAND, *args],
            env={**mine, **ports, "XDG_DATA_HOME": str(self._folder), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(self._kill, process)
        return process

    @staticmethod
    def _kill(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()

    def start(self, *args: str, **environ: str) -> Served:
        process = self.spawn(*args, **environ)
        assert process.stdout is not None
        assert process.stderr is not None
        ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
        assert ready, "no ready line"
        line = process.stdout.readline()
        match = READY.match(line)
        assert match, line or process.stderr.read()
        return Served(process, match[1], int(match[3]), match[4])

    def refused(self, *args: str, **environ: str) -> tuple[int, str]:
        """(exit code, standard error) of a service that does not start."""
        process = self.spawn(*args, **environ)
        out, err = process.communicate(timeout=DEADLINE_S)
        assert out == ""
        return process.returncode, err


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    with ExitStack() as stack:
        yield Starter(tmp_path, stack)


def until(store: Store, holds: Callable[[Store], bool]) -> None:
    """Wait until something holds in the database another process writes."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds(store):
        assert time.monotonic() < deadline, store.runs()
        time.sleep(0.05)


def test_without_arguments_it_serves_both_and_ends_cleanly(starter: Starter, tmp_path: Path) -> None:
    served = starter.start()
    assert served.db == f"sqlite:///{tmp_path}/commwatch/commwatch.db"
    assert httpx.get(f"{served.http}/healthz").status_code == 200
    assert httpx.get(f"{served.http}/readyz").status_code == 200
    assert served.end(signal.SIGINT) == 0
    # The second start finds what the first made.
    again = starter.start()
    assert again.end() == 0


def test_killed_between_frames_nothing_is_lost_or_doubled(starter: Starter, tmp_path: Path) -> None:
    """The agent resends everything after the last acknowledged frame, as a forwarder does."""
    sent = 30

    async def report(port: int, *, kill_after: int | None, served: Served) -> int:
        acked = 0
        async with Agent(port) as agent:
            acked = await agent.hello()
            await agent.send(definitions=ALL)
            for number in range(acked + 1, sent + 1):
                await agent.send(frames=frames(step_range(number, number, number), first=number))
                if number == kill_after:
                    # The frame is on its way: it may be stored or not, and nobody is told.
                    served.process.kill()
                    served.process.wait(DEADLINE_S)
                    return acked
                answer = await agent.receive()
                assert isinstance(answer, ingest_pb2.Ack)
                acked = answer.acked_frame
            await agent.send(goodbye=goodbye(last=progress(sent, sent, 1, sent)))
            assert await agent.receive() == ingest_pb2.Ack(acked_frame=sent, goodbye=True)
        return acked

    acked = 0
    for kill_after in (7, 8, 20, None):
        served = starter.start()
        with open_store(served.db, migrate=False) as store:
            stored = store.run(run_id(1)) and store.ranks(run_id(1))[0].acked_frame
            assert (stored or 0) >= acked
        acked = asyncio.run(report(served.grpc_port, kill_after=kill_after, served=served))
    with open_store(served.db, migrate=False) as store:
        (rank,) = store.ranks(run_id(1))
        assert (rank.acked_frame, rank.stored_steps, rank.steps, rank.state) == (sent, sent, sent, "clean")
        (ranges,) = store.ranges(run_id(1))
        assert [item.number for item in ranges.ranges] == list(range(1, sent + 1))
        assert store.run(run_id(1)).state == "complete"  # type: ignore[union-attr]
    assert served.end() == 0


def test_ending_with_open_streams_keeps_what_was_acknowledged(starter: Starter) -> None:
    served = starter.start()

    async def report() -> None:
        async with Agent(served.grpc_port) as agent:
            await agent.hello()
            await agent.send(definitions=ALL)
            await agent.send(frames=frames(facts(), step_range(1, 1, 5)))
            assert await agent.receive() == ingest_pb2.Ack(acked_frame=2)
            assert await asyncio.to_thread(served.end) == 0

    asyncio.run(report())
    with open_store(served.db, migrate=False) as store:
        assert store.ranks(run_id(1))[0].acked_frame == 2


def test_a_silent_rank_is_lost_and_a_returning_one_is_not(starter: Starter) -> None:
    served = starter.start(COMMWATCH_LOST_AFTER_S="0.6")

    async def vanish() -> None:
        async with Agent(served.grpc_port) as agent:
            await agent.hello()

    asyncio.run(vanish())
    with open_store(served.db, migrate=False) as store:
        until(store, lambda db: db.runs(state="lost") != [])
        assert [rank.state for rank in store.ranks(run_id(1))] == ["lost"]

        async def come_back() -> None:
            async with Agent(served.grpc_port) as agent:
                await agent.hello()
                assert store.run(run_id(1)).state == "running"  # type: ignore[union-attr]
                await agent.send(goodbye=goodbye())
                assert await agent.receive() == ingest_pb2.Ack(goodbye=True)

        asyncio.run(come_back())
        assert store.run(run_id(1)).state == "complete"  # type: ignore[union-attr]
    assert served.end() == 0


def test_ranks_get_time_to_come_back_after_a_restart(starter: Starter, tmp_path: Path) -> None:
    """What ranks said while no service listened was not silence."""
    db = tmp_path / "stopped.db"
    with open_store(f"sqlite:///{db}", migrate=True) as store:
        for rank in (0, 1):
            store.open_stream(stored_hello(rank=rank, world_size=2), time.time_ns() - 3600 * SECOND)
        served = starter.start("--db", str(db), COMMWATCH_LOST_AFTER_S="1.5")

        async def come_back() -> None:
            async with Agent(served.grpc_port) as agent:
                await agent.hello(1, 0, 0, 2)
                deadline = time.monotonic() + DEADLINE_S
                while store.ranks(run_id(1))[1].state == "live":
                    assert time.monotonic() < deadline
                    await agent.send(heartbeat=ingest_pb2.Heartbeat(progress=progress()))
                    await asyncio.sleep(0.05)
                assert [rank.state for rank in store.ranks(run_id(1))] == ["live", "lost"]

        asyncio.run(come_back())
    assert served.end() == 0


def test_a_finished_run_is_evaluated(starter: Starter) -> None:
    served = starter.start(COMMWATCH_EVALUATE_EVERY_S="0.05")

    async def report() -> None:
        async with Agent(served.grpc_port) as agent:
            await agent.hello()
            await agent.send(definitions=ALL)
            await agent.send(frames=frames(facts(), step_range(1, 1, 50)))
            assert await agent.receive() == ingest_pb2.Ack(acked_frame=2)
            await agent.send(goodbye=goodbye(last=progress(1, 50, 50, 50)))
            assert await agent.receive() == ingest_pb2.Ack(acked_frame=2, goodbye=True)

    asyncio.run(report())
    with open_store(served.db, migrate=False) as store:
        until(store, lambda db: db.compared(run_id(1)) is not None)
        base, verdict, reason = store.compared(run_id(1)) or (None, "", "")
        assert (base, verdict) == (None, "no_verdict")
        assert reason != ""
    assert served.end() == 0


def test_a_request_asked_of_one_replica_reaches_a_rank_at_another(starter: Starter) -> None:
    """Both share the database; the one that is asked over HTTP holds no stream."""
    holds, other = starter.start(), starter.start()
    assert holds.db == other.db
    captures = f"{other.http}/api/v1/runs/{run_id(1)}/captures"

    async def report() -> None:
        async with Agent(holds.grpc_port) as agent:
            await agent.hello()
            asked = await asyncio.to_thread(httpx.post, captures, json={"ranks": [0], "steps": 1, "author": "Ada"})
            assert asked.json()["requests"][0]["state"] == "asked"
            assert await agent.receive() == ingest_pb2.CaptureRequest(number=1, steps=1)
            await agent.send(frames=frames(capture(5, request=1)))
            assert await agent.receive() == ingest_pb2.Ack(acked_frame=1)

    asyncio.run(report())
    form = httpx.get(captures).json()
    assert [(request["state"], request["captured_steps"]) for request in form["requests"]] == [("captured", [5])]
    assert [(found["rank"], found["step"], found["request"]) for found in form["captures"]] == [(0, 5, 1)]
    tree = httpx.get(f"{captures}/0/5").json()
    assert [record["depth"] for record in tree["records"]] == [0, 1, 2, 3, 4, 2]
    assert (holds.end(), other.end()) == (0, 0)


@pytest.mark.parametrize(("variable", "option"), [("HTTP", "--http-listen"), ("GRPC", "--grpc-listen")])
def test_a_port_in_use_is_named_with_what_to_type(starter: Starter, variable: str, option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, err = starter.refused(**{f"COMMWATCH_{variable}_LISTEN": address})
    assert code == 4
    assert err.splitlines()[-1].startswith(f"commwatch serve: Cannot listen on {address}: ")
    assert err.endswith(f"Is another `commwatch serve` running? Name another address with {option}.\n")


def test_two_services_do_not_share_a_port(starter: Starter) -> None:
    first = starter.start()
    code, err = starter.refused("--grpc-listen", f"127.0.0.1:{first.grpc_port}")
    assert code == 4
    assert f"Cannot listen on 127.0.0.1:{first.grpc_port}" in err
    assert first.end() == 0


def test_what_is_wrong_with_the_database_is_one_line(starter: Starter, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\n" * 100)
    code, err = starter.refused("--db", str(notes))
    assert code == 4
    assert err == (
        f"commwatch serve: sqlite:///{notes} is not a database commwatch can read (file is not a database). "
        "Name another file with --db, or move this one away.\n"
    )
    code, err = starter.refused("--db", str(notes / "sub" / "commwatch.db"))
    assert (code, err) == (
        4,
        f"commwatch serve: Cannot create the folder {notes / 'sub'}: Not a directory. Name another file with --db.\n",
    )
    newer = tmp_path / "newer.db"
    open_store(f"sqlite:///{newer}", migrate=True).close()
    with sqlite3.connect(newer) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    code, err = starter.refused("--db", str(newer))
    assert code == 4
    assert err.startswith(f"commwatch serve: sqlite:///{newer} has schema 9999, newer than this release's ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "environ", "sentence"),
    [
        (["--http-listen", "0.0.0.0:0"], {}, "0.0.0.0:0 can be reached by other machines"),
        (["--grpc-listen", "8431"], {}, "'8431' is not an address to listen on"),
        (["--http-listen", "localhost:99999"], {}, "'localhost:99999' is not an address to listen on"),
        (["--nonsense"], {}, "No such option"),
        ([], {"COMMWATCH_LOST_AFTER_S": "soon"}, "COMMWATCH_LOST_AFTER_S is 'soon'"),
        ([], {"COMMWATCH_MAX_STREAMS": "0"}, "COMMWATCH_MAX_STREAMS is '0'"),
    ],
)
def test_wrong_usage_exits_two(starter: Starter, args: list[str], environ: dict[str, str], sentence: str) -> None:
    code, err = starter.refused(*args, **environ)
    assert code == 2
    assert sentence in err


def test_other_machines_are_served_only_when_asked_for(starter: Starter) -> None:
    process = starter.spawn("--http-listen", "0.0.0.0:0", "--insecure")
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], DEADLINE_S)[0]
    assert process.stdout.readline().startswith("commwatch ready: http http://0.0.0.0:")


def test_every_setting_is_in_the_table() -> None:
    rows = markdown_rows()
    assert len(rows) == len(Settings.model_fields)
    assert (
        rows[1]
        == "| `COMMWATCH_GRPC_LISTEN` | `127.0.0.1:8431` | host:port | Where agents report; port 0 takes a free one. |"
    )
    assert "| `COMMWATCH_LOST_AFTER_S` | `30.0` | s | Silence after which a rank counts as lost. |" in rows
    assert all(re.fullmatch(r"\| `COMMWATCH_[A-Z_]+` \| .+ \| .* \| .+\. \|", row) for row in rows)
