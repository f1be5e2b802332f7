"""Captures from the command line over HTTP, the database and a real gRPC stream to a rank, and back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from commwatch.service.cli import main
from commwatch.service.ingest.server import Limits
from commwatch.service.store.contract import Store
from commwatch.v1 import ingest_pb2
from tests.contract.agents import Agent
from tests.contract.samples import run_id
from tests.contract.serving import ALL, ack, serving
from tests.contract.wire_samples import (
    capture,
    completeness,
    facts,
    frames,
    goodbye,
    progress,
    refusal,
    step_range,
)
from tests.integration.http_service import serving as http_serving

DEADLINE_S = 20.0
RUN = run_id(1)
SHORT = RUN[:13]
TREE = """\
[nn.Mod] layers.0.wo
  aten::mm(dt: f32[8, 8]| S(0), dt: f32[8, 32]| S(0))  ->  dt: f32[8, 32]| S(0)
    redistribute_input [implicit] (1, S(0) -> R)
      redistribute_input(t: f32[4, 32], trace: S(0)->R)
        _c10d_functional::all_gather_into_tensor(t: f32[4, 32], 2, 0)  ->  t: f32[8, 32]  # all_gather on tp \
(2 ranks, stride 1), forward, layers.0.wo, call 1; model.py:12 in forward
    aten::t(t: f32[8, 32])  ->  t: f32[32, 8]
"""


@dataclass
class Commands:
    """Runs one command at a time in a thread, as a shell would beside the service."""

    url: str
    capsys: pytest.CaptureFixture[str]

    async def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, [*arguments, "--url", self.url])
        out, err = self.capsys.readouterr()
        return code, out, err

    def start(self, *arguments: str) -> asyncio.Task[tuple[int, str, str]]:
        return asyncio.create_task(self(*arguments))


@dataclass
class Everything:
    """One service: where ranks report, its store, and its commands."""

    port: int
    store: Store
    command: Commands

    async def until(self, holds: Callable[[Store], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not await asyncio.to_thread(holds, self.store):
            assert time.monotonic() < deadline, self.store.capture_requests(RUN)
            await asyncio.sleep(0.01)

    def states(self) -> list[tuple[int, str]]:
        return [(item.rank, item.state) for item in self.store.capture_requests(RUN)]


Run = Callable[[Callable[[Everything], Awaitable[None]]], None]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Serve gRPC and HTTP while the body runs."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("commwatch.service.cli.capture.LOOK_EVERY_S", 0.02)

    def serve(body: Callable[[Everything], Awaitable[None]]) -> None:
        async def both() -> None:
            async with serving(tmp_path, limits=Limits(requests_every_s=0.02)) as service:
                with http_serving(service.store) as url:
                    await body(Everything(service.port, service.store, Commands(url, capsys)))

        asyncio.run(both())

    return serve


async def report(agent: Agent, *, rank: int = 0, world_size: int = 1) -> None:
    """A rank with a steady step."""
    assert await agent.hello(1, 0, rank, world_size) == 0
    await agent.send(definitions=ALL)
    await agent.send(frames=frames(facts(), step_range(1, 1, 10)))
    assert await agent.receive() == ack(2)


async def asked(agent: Agent, number: int = 1, steps: int = 1) -> None:
    assert await agent.receive() == ingest_pb2.CaptureRequest(number=number, steps=steps)


async def answer(agent: Agent, *contents: object, first: int = 3) -> None:
    await agent.send(frames=frames(*contents, first=first))  # type: ignore[arg-type]
    assert await agent.receive() == ack(first + len(contents) - 1)


def test_a_running_rank_is_asked_captures_and_is_shown_as_a_tree(run: Run) -> None:
    async def body(service: Everything) -> None:
        async with Agent(service.port) as agent:
            await report(agent)
            command = service.command.start("capture", SHORT, "--steps", "2", "--author", "Ada")
            await asked(agent, 1, 2)
            await service.until(lambda _: service.states() == [(0, "sent")])
            await answer(agent, capture(11, request=1), capture(12, request=1))
            code, out, err = await command
        assert code == 0
        assert out.splitlines() == [
            f"rank 0      commwatch show {SHORT} --step 11 --rank 0",
            f"rank 0      commwatch show {SHORT} --step 12 --rank 0",
        ]
        assert err.splitlines()[0] == "rank 0: not sent to the rank yet"
        assert err.splitlines()[-1] == "rank 0: captured"
        (request,) = service.store.capture_requests(RUN)
        assert (request.asked_by, request.captured_steps) == ("Ada", (11, 12))
        code, out, _ = await service.command("show", SHORT, "--step", "11")
        assert code == 0
        assert out.split("\n", 1)[1] == "captured    step 11 of rank 0: 6 records, 1 collective\n" + TREE
        assert (
            "captured    step 11 of rank 0; step 12 of rank 0; print one with --step\n"
            in (await service.command("show", SHORT))[1]
        )

    run(body)


def test_ranks_that_refuse_or_end_are_named_with_their_reason(run: Run) -> None:
    async def body(service: Everything) -> None:
        async with Agent(service.port) as first, Agent(service.port) as second, Agent(service.port) as third:
            for rank, agent in enumerate((first, second, third)):
                await report(agent, rank=rank, world_size=3)
            command = service.command.start("capture", SHORT, "--ranks", "0-2")
            for agent in (first, second, third):
                await asked(agent)
            await answer(first, capture(11, request=1))
            await answer(second, refusal(1, "This torch lacks a hook."))
            await third.send(goodbye=goodbye(last=progress(1, 12, 12, 12)))
            assert await third.receive() == ack(2, goodbye=True)
            code, out, _ = await command
        assert code == 1
        assert out.splitlines() == [
            f"rank 0      commwatch show {SHORT} --step 11 --rank 0",
            "rank 1      refused: This torch lacks a hook.",
            "rank 2      missed: The rank ended after 12 steps.",
        ]
        code, out, err = await service.command("capture", SHORT, "--ranks", "2", "--json")
        (request,) = json.loads(out)["requests"]
        assert (code, request["state"], request["number"]) == (1, "missed", 2)
        assert err == "rank 2: missed: The rank ended after 12 steps.\n"

    run(body)


def test_a_wait_that_is_over_says_that_the_request_stays_open(run: Run) -> None:
    async def body(service: Everything) -> None:
        async with Agent(service.port) as agent:
            await report(agent)
            code, out, _ = await service.command("capture", SHORT, "--no-wait")
            assert (code, out.splitlines()[0]) == (0, "rank 0      not sent to the rank yet")
            await asked(agent)
            code, out, err = await service.command("capture", SHORT, "--wait", "0.1")
            assert code == 1
            assert out.splitlines()[-1] == f"Request 2 stays open; `commwatch show {SHORT}` says what was captured."
            assert err.splitlines()[0] == "rank 0: not sent to the rank yet"

    run(body)


def test_a_rank_that_reconnects_is_asked_again_until_it_answered(run: Run) -> None:
    async def body(service: Everything) -> None:
        async with Agent(service.port) as agent:
            await report(agent)
            service.store.ask_captures(RUN, [0], 1, "Ada", 1)
            await asked(agent)
            await service.until(lambda _: service.states() == [(0, "sent")])
        async with Agent(service.port) as again:
            assert await again.hello() == 2
            await asked(again)
            await answer(again, capture(11, request=1))
        async with Agent(service.port) as third:
            assert await third.hello() == 3
            service.store.ask_captures(RUN, [0], 3, "Ada", 1)
            # The answered one does not come again.
            await asked(third, 2, 3)

    run(body)


def test_a_request_is_sent_only_when_a_stream_took_it(run: Run) -> None:
    async def body(service: Everything) -> None:
        async with Agent(service.port) as agent, Agent(service.port) as other:
            await report(agent, world_size=2)
            await report(other, rank=1, world_size=2)
            await agent.end()
            service.store.ask_captures(RUN, [0, 1], 1, "Ada", 1)
            await asked(other)
            await service.until(lambda _: service.states() == [(0, "asked"), (1, "sent")])

    run(body)


def test_limits_and_unknown_ranks_are_refused_in_words(run: Run) -> None:
    async def body(service: Everything) -> None:
        async with Agent(service.port) as agent:
            await report(agent)
            code, _, err = await service.command("capture", SHORT, "--ranks", "0,7")
            assert code == 2
            assert err == f"commwatch capture: Rank 7 does not report in run {SHORT}, which has rank 0.\n"
            for _ in range(8):
                service.store.ask_captures(RUN, [0], 1, "Ada", 1)
            code, out, _ = await service.command("capture", SHORT, "--json")
            error = json.loads(out)["error"]
            assert (code, error["code"]) == (2, "capture_refused")
            assert error["message"] == (
                f"Run {SHORT} has 8 open capture requests, as many as a run may have: "
                "ask again when its ranks have answered them."
            )
        for option in (("--ranks", "x"), ("--ranks", "3-1"), ("--ranks", "0-64"), ("--steps", "17"), ("--steps", "0")):
            assert (await service.command("capture", SHORT, *option))[0] == 2

    run(body)


def test_malformed_captures_are_rejected_counted_and_the_stream_goes_on(run: Run) -> None:
    async def body(service: Everything) -> None:
        async with Agent(service.port) as agent:
            await report(agent)
            broken = capture(11)
            broken.records[2].depth = 1_001
            await agent.send(frames=frames(broken, completeness(unequal_steps=9), capture(12), first=3))
            for number, reason in (
                (3, "a record has the depth 1001, more than 1000"),
                (4, "9 unequal steps up to step 1, the first of them step 0"),
            ):
                assert await agent.receive() == ingest_pb2.Rejected(frame=number, reason=reason)
            assert await agent.receive() == ack(5)
        assert service.store.ranks(RUN)[0].rejected_frames == 2
        assert [item.step for item in service.store.captures(RUN)] == [12]

    run(body)


def test_the_parts_of_a_step_are_limited_over_all_streams_of_a_rank(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commwatch.service.ingest.captures.MAX_RECORDS", 10)

    async def body(service: Everything) -> None:
        async with Agent(service.port) as agent:
            await report(agent)
            await answer(agent, capture(11, 1, False))
        async with Agent(service.port) as agent:
            assert await agent.hello() == 3
            await agent.send(frames=frames(capture(11, 2), capture(12), first=4))
            reason = "step 11 has 12 captured records, more than 10"
            assert await agent.receive() == ingest_pb2.Rejected(frame=4, reason=reason)
            assert await agent.receive() == ack(5)
        code, out, _ = await service.command("show", SHORT, "--step", "11")
        assert (code, out.splitlines()[2]) == (0, "incomplete  only part 1 arrived; the last is missing")

    run(body)


def test_completeness_and_cost_of_a_stream_are_shown(run: Run) -> None:
    async def body(service: Everything) -> None:
        async with Agent(service.port) as agent:
            await report(agent)
            await answer(agent, completeness(41_233, 41_233, 10, 3))
            told = progress(1, 20, 20, 20)
            told.expected_calls, told.unverified_calls, told.unattributed_calls = 41_233, 1, 3
            told.recording_ns, told.elapsed_ns = 4_200_000, 350_000_000
            await agent.send(goodbye=goodbye(last=told))
            assert await agent.receive() == ack(3, goodbye=True)
        code, out, _ = await service.command("show", SHORT)
        assert code == 0
        assert (
            "recorded    41,233 of 41,233 collectives, 3 without module, 1 not verifiable (solo (1 rank), no\n"
            "            second source)\n"
            "agent       0.21 ms a step, 1.2 % of the step\n"
        ) in out
        code, out, _ = await service.command("show", SHORT, "--json")
        (rank,) = json.loads(out)["ranks"]
        counters = ("expected_calls", "unverified_calls", "unattributed_calls", "recording_ns", "elapsed_ns")
        assert [rank[name] for name in counters] == [41_233, 1, 3, 4_200_000, 350_000_000]

    run(body)


def test_collectives_in_cuda_graphs_are_shown_as_not_observable_and_give_no_verdict(run: Run) -> None:
    async def body(service: Everything) -> None:
        async with Agent(service.port) as agent:
            await report(agent)
            await answer(agent, completeness(41_233, 41_233, 10, graph_calls=3))
            await agent.send(goodbye=goodbye(last=progress(1, 20, 20, 20)))
            assert await agent.receive() == ack(3, goodbye=True)
        reason = (
            "Rank 0 captured 3 collectives into CUDA graphs, whose replays are not observable: "
            "what was recorded is a lower bound."
        )
        code, out, _ = await service.command("show", SHORT)
        assert code == 0
        assert (
            "recorded    41,233 of at least 41,233 collectives, 0 without module, 1 not verifiable (solo (1\n"
            "            rank), no second source)\n"
            "graphs      not observable: replays of CUDA graphs, which hold 3 collectives of rank 0\n"
        ) in out
        assert "steady step" not in out
        code, out, _ = await service.command("show", SHORT, "--json")
        form = json.loads(out)
        assert form["steady"] is None
        assert form["reasons"] == [{"code": "graph_replays", "message": reason}]
        assert form["completeness"]["graphs"] == [{"rank": 0, "calls": 3}]
        assert [rank["completeness"]["graph_calls"] for rank in form["ranks"]] == [3]
        code, out, _ = await service.command("compare", SHORT, SHORT, "--json")
        compared = json.loads(out)
        assert (code, compared["verdict"]) == (3, "no_verdict")
        assert {found["code"] for found in compared["reasons"]} == {"graph_replays"}

    run(body)


def test_a_tree_is_asked_of_the_lowest_rank_that_captured_the_step(run: Run) -> None:
    async def body(service: Everything) -> None:
        async with Agent(service.port) as agent:
            await agent.hello(1, 0, 2, 3)
            await answer(agent, capture(3), first=1)
        code, out, _ = await service.command("show", SHORT, "--step", "3", "--noise", "0", "--json")
        form = json.loads(out)
        assert (code, form["capture"]["rank"], len(form["records"]), form["capture"]["records"]) == (0, 2, 5, 6)

    run(body)
