"""``explain``, filters of ``show --step``, and what incomplete recording does to answers: real HTTP, real store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from commwatch.service.cli import main
from commwatch.service.domain.captures import Capture
from commwatch.service.domain.records import Completeness, Frame, Goodbye, Line, Progress, RankKey
from commwatch.service.domain.sites import site_of
from commwatch.service.store.contract import Store, StreamWrite
from commwatch.service.store.opening import open_store
from commwatch.service.verdicts import evaluate
from tests.contract.samples import capture, completeness
from tests.integration.http_service import serving
from tests.unit.service.domain.jobs import IMPLICIT, NOW, Calls, Job, layers, sha

GATHER = Calls("all_gather", "layers.*.wo", 2, 1024, cause=IMPLICIT, line=Line("model.py", 88, "forward"))
STEP = (*layers(4, GATHER, Calls("all_reduce", "layers.*.wo", 1, 64)), Calls("all_reduce", "", 1, 64, "clip"))
JOB = Job(1, STEP)
GATHER_ID = site_of(GATHER.call).hash
REDUCE_ID = site_of(STEP[1].call).hash
RUN = "00000001-0000"
HEADER = f"run {RUN} at {sha(7)[:8]} (main): Commit 7\n"
FRAMES_OF_A_JOB = 2

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'commwatch.db'}", migrate=True)
    yield opened
    opened.close()


@pytest.fixture
def run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Run one command in an empty folder; gives exit code, output and error output."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    with serving(store) as url:
        monkeypatch.setenv("COMMWATCH_URL", url)
        yield call


def add(store: Store, job: Job, rank: int, *contents: Capture | Completeness) -> None:
    """More frames of a rank that reported its job."""
    frames = [Frame(number, content) for number, content in enumerate(contents, FRAMES_OF_A_JOB + 1)]
    store.apply([StreamWrite(RankKey(job.id, 0, rank), job.project, list(frames))], NOW)


CHAIN = (
    f"site         {GATHER_ID}\n"
    "line         model.py:88 in forward\n"
    "module       layers.*.wo (4 modules)\n"
    "op           aten.mm.default\n"
    "redistribute implicit, S(0) -> R\n"
    "collective   all_gather (c10d::all_gather_) on tp (2 ranks, stride 1), forward, float32\n"
    "step         32 calls a step over 4 ranks (8 on each), 32.8 kB payload\n"
)
REMEDY = (
    "what helps   aten.mm.default was given an argument with the placements S(0) and runs on R. What\n"
    "             usually helps is to make that argument with R, to give the op's other arguments\n"
    "             placements with which it runs on S(0), or, where several ops use it, to redistribute it\n"
    "             once for all of them.\n"
)


@pytest.mark.parametrize(
    "site", [GATHER_ID[:8], GATHER_ID, "all_gather:layers.*.wo", "all_gather:*", "all_gather:layers.2.wo"]
)
def test_the_chain_of_a_site_is_printed_whatever_it_is_called(store: Store, run: Run, site: str) -> None:
    JOB.feed(store)
    assert run("explain", "main", site) == (0, HEADER + CHAIN + REMEDY, "")


def test_show_prints_the_ids_that_explain_takes(store: Store, run: Run) -> None:
    JOB.feed(store)
    table = run("show", "main")[1].split("\n\n")[1].splitlines()
    ids = [line.split()[0] for line in table[1:] if not line.startswith(" ")]
    assert ids[:2] == [GATHER_ID[:8], REDUCE_ID[:8]]
    assert [run("explain", "main", short)[0] for short in ids] == [0, 0, 0]


def test_a_capture_adds_the_path_through_the_tree(store: Store, run: Run) -> None:
    JOB.feed(store)
    add(store, JOB, 1, capture(5))
    code, out, _ = run("explain", "main", "all_gather:layers.*.wo")
    assert (code, out) == (
        0,
        HEADER
        + CHAIN
        + "captured in step 5 of rank 1:\n"
        + "  [nn.Mod] layers.0.wo\n"
        + "    aten::mm(dt: f32[8, 8]| S(0), dt: f32[8, 32]| S(0))  ->  dt: f32[8, 32]| S(0)\n"
        + "      redistribute_input [implicit] (1, S(0) -> R)\n"
        + "        redistribute_input(t: f32[4, 32], trace: S(0)->R)\n"
        + "          _c10d_functional::all_gather_into_tensor(t: f32[4, 32], 2, 0)  ->  t: f32[8, 32]\n"
        + REMEDY,
    )
    form = json.loads(run("explain", "main", GATHER_ID, "--json")[1])
    assert (form["site"]["site"], form["path"]["rank"], form["path"]["step"]) == (GATHER_ID, 1, 5)
    assert [link["link"] for link in form["chain"]] == ["line", "module", "op", "redistribute", "collective", "step"]
    # The capture holds no call of this one.
    assert json.loads(run("explain", "main", REDUCE_ID, "--json")[1])["path"] is None


def test_what_is_unknown_is_said_and_nothing_is_advised(store: Store, run: Run) -> None:
    JOB.feed(store)
    code, out, _ = run("explain", "main", "all_reduce:")
    assert code == 0
    assert out.splitlines()[2:6] == [
        "line         no line of the program known",
        "module       no module known",
        "op           no op known",
        "redistribute no redistribute known",
    ]
    assert "what helps" not in out


def test_several_sites_are_listed_and_exit_2(store: Store, run: Run) -> None:
    JOB.feed(store)
    code, out, err = run("explain", "main", "layers.*.wo")
    assert (code, out) == (2, "")
    assert err == (
        f"commwatch explain: layers.*.wo stands for 2 sites: {GATHER_ID[:8]} (forward all_gather in layers.*.wo on tp, "
        f"S(0) -> R), {REDUCE_ID[:8]} (forward all_reduce in layers.*.wo on tp). Name one by its id.\n"
        f"Nearest: {GATHER_ID[:8]}, {REDUCE_ID[:8]}\n"
    )
    error = json.loads(run("explain", "main", "layers.*.wo", "--json")[1])["error"]
    assert (error["code"], error["matches"], error["ref"]) == (
        "ambiguous_site",
        [GATHER_ID[:8], REDUCE_ID[:8]],
        "layers.*.wo",
    )


def test_an_unknown_site_or_a_run_without_a_steady_step_exits_2(store: Store, run: Run) -> None:
    JOB.feed(store)
    Job(2, STEP, steps=1, commit=8).feed(store)
    code, _, err = run("explain", "main~1", "wq")
    named = f"name one by the id that `commwatch show {RUN}` prints, or as MODULE or KIND:MODULE."
    assert (code, err) == (2, f"commwatch explain: Run {RUN} has no site 'wq': {named}\n")
    code, _, err = run("explain", "main", "wq")
    why = "has no steady step, and so no sites: Ranks 0-3 ran no pattern for 3 steps."
    assert (code, err) == (2, f"commwatch explain: Run 00000002-0000 {why}\n")


@pytest.mark.parametrize(
    ("options", "depths"),
    [
        ((), [0, 1, 2, 3, 4, 2]),
        (("--noise", "2"), [0, 1, 2, 3, 4]),
        (("--kind", "dtensor_op"), [0, 1]),
        (("--kind", "dtensor_op", "--kind", "all_gather"), [0, 1, 2, 3, 4]),
        (("--module", "layers.*.wo", "--depth", "2"), [0, 1]),
        (("--module", "layers.1.wo"), []),
        (("--noise", "0", "--depth", "3"), [0, 1, 2]),
    ],
)
def test_filters_keep_what_is_above(store: Store, run: Run, options: tuple[str, ...], depths: list[int]) -> None:
    JOB.feed(store)
    add(store, JOB, 0, capture(5))
    code, out, _ = run("show", "main", "--step", "5", *options)
    lines = out.splitlines()
    shown = f", {len(depths)} shown" if len(depths) < 6 else ""
    assert (code, lines[1]) == (0, f"captured    step 5 of rank 0: 6 records, 1 collective{shown}")
    assert [(len(line) - len(line.lstrip())) // 2 for line in lines[2:]] == depths
    form = json.loads(run("show", "main", "--step", "5", *options, "--json")[1])
    assert [record["depth"] for record in form["records"]] == depths


def test_the_mesh_is_shown_where_it_is_asked_for(store: Store, run: Run) -> None:
    JOB.feed(store)
    add(store, JOB, 0, capture(5))
    assert "dt: f32[8, 8]| S(0) on DM(2), " in run("show", "main", "--step", "5", "--mesh")[1]


def test_dropped_records_are_said(store: Store, run: Run) -> None:
    JOB.feed(store)
    add(store, JOB, 0, capture(5, dropped=1_234, reason="The capture was full."))
    assert run("show", "main", "--step", "5")[1].splitlines()[2] == "left out    1,234 records: The capture was full."


def test_a_step_that_was_not_captured_names_those_that_were_and_how_to_get_one(store: Store, run: Run) -> None:
    JOB.feed(store)
    help_ = (
        "To get one, start the job with COMMWATCH_CAPTURE_STEPS=3,100:102, or ask one that runs with "
        "`commwatch capture RUN`.\n"
    )
    code, out, err = run("show", "main", "--step", "9")
    assert (code, out) == (2, "")
    assert err == f"commwatch show: Run {RUN} has no capture of step 9 of rank 0. Nothing was captured. {help_}"
    for rank in (0, 1, 3):
        add(store, JOB, rank, capture(5), *([capture(6)] if rank == 3 else []))
    code, _, err = run("show", "main", "--step", "6", "--rank", "1")
    captured = "Captured: step 5 of ranks 0-1, 3; step 6 of rank 3."
    assert (code, err) == (2, f"commwatch show: Run {RUN} has no capture of step 6 of rank 1. {captured} {help_}")
    assert run("show", "main", "--step", "6")[0] == 0
    error = json.loads(run("show", "main", "--step", "7", "--json")[1])["error"]
    assert error["code"] == "unknown_capture"


def test_a_running_run_can_be_asked_for_the_missing_capture(store: Store, run: Run) -> None:
    replace(JOB, state="running").feed(store)
    assert run("show", "main", "--step", "9")[2].endswith(f"or type `commwatch capture {RUN}` now.\n")


@pytest.mark.parametrize(
    "option", [("--rank", "0"), ("--kind", "op"), ("--module", "x"), ("--noise", "3"), ("--depth", "1"), ("--mesh",)]
)
def test_options_of_the_tree_need_a_step(run: Run, option: tuple[str, ...]) -> None:
    code, _, err = run("show", "main", *option)
    assert code == 2
    assert f"{option[0]} chooses records of a captured step: name the step with --step." in err


def test_incomplete_recording_gives_no_verdict_and_names_rank_group_and_counts(store: Store, run: Run) -> None:
    JOB.feed(store)
    head = Job(2, STEP, commit=8)
    head.feed(store)
    for rank in range(4):
        add(store, JOB, rank, completeness(90, 90, 10))
        add(store, head, rank, completeness(88 if rank == 2 else 90, 90, 10))
    reason = "Rank 2 recorded 88 collectives on group tp (2 ranks), where 90 were expected."
    for command, code in ((["compare", "main~1", "main"], 3), (["gate", "--base", "main~1", "--head", "main"], 3)):
        found, out, _ = run(*command)
        assert (found, f"The head run: {reason}" in out.replace("\n        ", " ")) == (code, True)
    evaluate(store, head.id, NOW)
    assert store.compared(head.id) == (None, "no_verdict", reason)
    code, out, _ = run("show", "main")
    assert code == 0
    assert (
        "recorded    358 of 360 collectives, 0 without module, 4 not verifiable (solo (1 rank), no second\n"
        "            source)\n"
        "unequal     rank 2: 88 of 90 collectives on tp (2 ranks, stride 1), unequal in 1 step, the first\n"
        "            step 10\n"
        "agent       own cost not reported\n"
        "verdict     no verdict. Rank 2 recorded 88 collectives on group tp (2 ranks), where 90 were\n"
        "            expected.\n"
        f"no step     {reason}\n"
    ) in out
    # The base alone is whole.
    assert run("compare", "main~1", "main~1")[0] == 0
    assert [row.split()[7] for row in run("runs")[1].splitlines()[1:]] == ["-", "52"]


def test_a_running_run_may_make_up_for_what_is_missing_and_is_judged_at_its_end(store: Store, run: Run) -> None:
    JOB.feed(store)
    head = Job(2, STEP, commit=8, state="running")
    head.feed(store)
    add(store, head, 2, completeness(88, 90, 10))
    evaluate(store, head.id, NOW)
    assert store.compared(head.id) is None
    frames = [Frame(FRAMES_OF_A_JOB + 2, completeness(92, 92, 11))]
    last = Progress(1, 11, 10, 11, 0, 0, 0, "")
    for rank in range(4):
        write = StreamWrite(RankKey(head.id, 0, rank), head.project, list(frames) if rank == 2 else [])
        write.goodbye = Goodbye("clean", "", last)
        store.apply([write], NOW)
    evaluate(store, head.id, NOW)
    compared = store.compared(head.id)
    assert compared is not None
    assert compared[:2] == (JOB.id, "same")
    assert run("gate", "--base", "main~1", "--head", "main")[0] == 0


def test_ranks_that_never_reported_completeness_are_named(store: Store, run: Run) -> None:
    JOB.feed(store)
    add(
        store,
        JOB,
        1,
        replace(
            completeness(90, 90, 10), groups=completeness(90, 90).groups[:1], unequal_steps=2, first_unequal_step=4
        ),
    )
    out = run("show", "main")[1]
    assert (
        "recorded    90 of 90 collectives, 0 without module, not reported by ranks 0, 2-3\n"
        "unequal     rank 1: equal again, unequal in 2 steps, the first step 4\n"
    ) in out
    # What was made up for leaves the steady step as it is.
    assert "steady step" in out
