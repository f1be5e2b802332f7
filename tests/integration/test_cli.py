"""The command line against the real HTTP application and a real store: what it prints, and its exit codes."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from commwatch.client import Client, RefusedError
from commwatch.service.cli import main
from commwatch.service.domain.records import Line
from commwatch.service.store.contract import Store
from commwatch.service.store.opening import open_store
from commwatch.service.verdicts import evaluate
from tests.integration.http_service import serving
from tests.unit.service.domain.jobs import IMPLICIT, NOW, Calls, Job, layers, run_id, sha

GOOD = layers(4, Calls("all_reduce", "layers.*.wo", 2, 1024))
GATHER = Calls("all_gather", "layers.*.wo", 2, 1024, cause=IMPLICIT, line=Line("model.py", 88, "forward"))
BASE = Job(1, GOOD, commit=7, warm_up=(Calls("broadcast", "embed"),))
HEAD = Job(2, (*GOOD, *layers(4, GATHER)), commit=8)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'commwatch.db'}", migrate=True)
    yield opened
    opened.close()


@pytest.fixture
def service(store: Store) -> Iterator[str]:
    with serving(store) as url:
        yield url


@pytest.fixture
def run(service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one command in an empty folder; gives exit code, output and error output."""
    monkeypatch.setenv("COMMWATCH_URL", service)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def regressed(store: Store) -> Store:
    BASE.feed(store)
    HEAD.feed(store)
    evaluate(store, HEAD.id, NOW)
    return store


def test_gate_fails_a_regression_and_says_what_why_and_how_to_accept(regressed: Store, run: Run) -> None:
    code, out, _ = run("gate", "--base", "main~1", "--head", "main")
    assert code == 1
    assert out == (
        f"base    run 00000001-0000 at {sha(7)[:8]} (main): Commit 7 [named as main~1]\n"
        f"head    run 00000002-0000 at {sha(8)[:8]} (main): Commit 8\n"
        "alert   +2 all_gather per layer (x4) in layers.*.wo, forward: implicit redistribute S(0) -> R asked\n"
        "        by aten.mm.default at model.py:88\n"
        "        +32 calls, +32.8 kB payload per step over 4 ranks; group tp (2 ranks, stride 1); float32\n"
        "calls per step: 32 -> 64 over all ranks\n"
        "+32.8 kB payload per step (+100 %): 32.8 kB -> 65.5 kB over all ranks\n"
        "left out of base: ranks 0-3: 1 step before the steady pattern\n"
        "Why it matters: 32 more calls and 32.8 kB more payload in every step; each call makes all ranks of\n"
        "its group wait for the slowest.\n"
        "If this is wanted, accept it:\n"
        "  commwatch accept 00000002-0000 --reason TEXT\n"
        "gate: exit 1 regression: 1 alert\n"
    )


def test_accepting_makes_the_gate_pass_and_closes_the_alert(regressed: Store, run: Run) -> None:
    title = "+2 all_gather per layer (x4) in layers.*.wo, forward: implicit redistribute S(0) -> R"
    code, out, _ = run("alerts")
    assert (code, out.splitlines()[0]) == (0, f"open      {title}")
    code, out, _ = run("accept", "00000002-0000", "--reason", "new [head]", "--author", "Ada")
    assert (code, out.splitlines()[:2]) == (
        0,
        [
            f"run 00000002-0000 at {sha(8)[:8]} (main): Commit 8 is a baseline of train",
            "accepted    by Ada: new [head]",
        ],
    )
    assert run("alerts")[:2] == (0, "No open alerts.\n")
    code, out, _ = run("alerts", "--state", "all", "--run", "main")
    assert "accepted by Ada: new [head]" in out
    Job(3, HEAD.step, commit=9).feed(regressed)
    code, out, _ = run("gate", "--base", sha(7), "--head", "main", "--json")
    form = json.loads(out)
    assert (code, form["verdict"], form["exit_code"], form["base"]["id"]) == (0, "same", 0, run_id(2))
    assert form["base_reason"] == f"accepted by Ada: new [head]; it stands in for {sha(7)}, run 00000001-0000"


def test_acceptance_keeps_its_first_reason(regressed: Store, run: Run) -> None:
    run("accept", "main", "--reason", "first", "--author", "Ada")
    code, out, _ = run("accept", "main", "--reason", "second", "--author", "Bob", "--json")
    accepted = json.loads(out)["run"]["accepted"]
    assert (code, accepted["reason"], accepted["author"]) == (0, "first", "Ada")


def test_warning_fails_only_with_strict(store: Store, run: Run) -> None:
    Job(1, GOOD, commit=7).feed(store)
    Job(2, (*GOOD, Calls("all_reduce", "lm_head", 1, 8)), commit=8).feed(store)
    code, out, _ = run("gate", "--base", "main~1", "--head", "main")
    assert (code, out.splitlines()[-1]) == (0, "gate: exit 0 changed: 1 warning")
    code, out, _ = run("gate", "--base", "main~1", "--head", "main", "--strict")
    assert (code, out.splitlines()[-1]) == (1, "gate: exit 1 regression: 1 warning")


@pytest.mark.parametrize(
    ("arguments", "code", "last"),
    [
        (("--base", "main", "--head", "main"), 0, "gate: exit 0 same"),
        (("--base", "main", "--head", "main~1"), 0, "gate: exit 0 changed: 1 info"),
        (("--base", "main~3", "--head", "main"), 3, "gate: exit 3 no verdict"),
    ],
)
def test_last_line_of_the_gate_is_its_exit_code(
    regressed: Store, run: Run, arguments: tuple[str, ...], code: int, last: str
) -> None:
    found, out, _ = run("gate", *arguments)
    assert (found, out.splitlines()[-1]) == (code, last)


def test_gate_on_a_lost_head_has_no_verdict_and_names_the_rank(store: Store, run: Run) -> None:
    BASE.feed(store)
    HEAD.feed(store, endings={2: "lost"})
    code, out, _ = run("gate", "--base", "main~1", "--head", "main")
    assert code == 3
    assert out.splitlines()[2:] == ["why     The head run is lost: rank 2 lost.", "gate: exit 3 no verdict"]
    code, out, _ = run("show", "main")
    assert code == 0
    assert "            rank 2 on host2, pid 1002: lost, after 10 steps\n" in out


def test_unknown_name_exits_2_with_the_nearest_matches(regressed: Store, run: Run) -> None:
    for command in (["show", "mian"], ["compare", "mian", "main"], ["gate", "--base", "main", "--head", "mian"]):
        code, out, err = run(*command)
        assert (code, out) == (2, "")
        assert err == (
            f"commwatch {command[0]}: No run, commit or branch of project default is called mian.\nNearest: main\n"
        )
    code, out, _ = run("show", "mian", "--json")
    message = "No run, commit or branch of project default is called mian."
    assert (code, json.loads(out)) == (
        2,
        {"error": {"code": "unknown_ref", "message": message, "matches": ["main"], "ref": "mian"}},
    )


def test_several_workloads_are_listed(regressed: Store, run: Run) -> None:
    Job(3, GOOD, commit=8, workload="eval").feed(regressed)
    code, _, err = run("show", "main")
    assert code == 2
    assert err == (
        "commwatch show: Several workloads ran at main: eval, train. Name one with --workload.\nNearest: eval, train\n"
    )
    assert run("show", "main", "--workload", "eval")[0] == 0


@pytest.mark.parametrize(
    "command", [["runs"], ["gate", "--base", "a", "--head", "b"], ["accept", "x", "--reason", "y"]]
)
def test_unreachable_service_exits_4(run: Run, command: list[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        code, out, err = run(*command, "--url", url)
    assert (code, out) == (4, "")
    assert err.startswith(f"commwatch {command[0]}: The service at {url} did not answer")
    assert "Start it with `commwatch serve`" in err


def test_wrong_usage_exits_2(run: Run) -> None:
    assert run("gate", "--base", "main")[0] == 2
    assert run("accept", "main")[0] == 2
    assert run("shwo")[0] == 2


def test_runs_table(regressed: Store, run: Run) -> None:
    Job(3, GOOD, commit=9, dirty=True, steps=2).feed(regressed)
    code, out, _ = run("runs")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert [row[:-1] for row in rows] == [
        ["run", "workload", "commit", "branch", "state", "ranks", "steps", "calls/step", "alerts"],
        ["00000003-0000", "train", f"{sha(9)[:8]}*", "main", "complete", "4", "2", "-", "0"],
        ["00000002-0000", "train", sha(8)[:8], "main", "complete", "4", "10", "64", "1"],
        ["00000001-0000", "train", sha(7)[:8], "main", "complete", "4", "11", "32", "0"],
    ]


def test_runs_table_fits_100_and_80_columns(regressed: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    long = Job(3, GOOD, commit=9, dirty=True, branch="feature/a-rather-long-name", workload="llama-70b-pretraining")
    long.feed(regressed)
    for columns in (100, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = run("runs")[1].splitlines()
        assert len(lines) == 4
        assert max(map(len, lines)) <= columns
        assert lines[1].split()[0] == "00000003-0000"
        assert f"{sha(9)[:8]}*" in lines[1]


def test_output_has_no_colour_where_nobody_sees_it(regressed: Store, run: Run) -> None:
    for command in (["runs"], ["show", "main"], ["compare", "main~1", "main"], ["alerts"]):
        assert "\x1b" not in run(*command)[1]


def test_show_lists_every_site_and_what_was_left_out(regressed: Store, run: Run) -> None:
    code, out, _ = run("show", "main~1")
    assert code == 0
    assert out == (
        f"run 00000001-0000 at {sha(7)[:8]} (main): Commit 7\n"
        f"id          {run_id(1)}\n"
        "workload    train of project default, script train.py\n"
        "state       complete: 4 of 4 ranks reported, 11 steps, 0 calls\n"
        "environment torch 2.13.0+cpu, gloo on cpu, 4 ranks, mesh dp=2 x tp=2, eager\n"
        "recorded    completeness not reported\n"
        "agent       own cost not reported\n"
        "steady step 32 calls, 32.8 kB payload over all ranks; seen 10 times\n"
        "left out    ranks 0-3: 1 step before the steady pattern\n"
        "\n"
        "site     phase   kind       group calls per rank payload module and cause\n"
        "154db8e1 forward all_reduce tp(2)    32        8 32.8 kB layers.*.wo (x4)\n"
    )


def test_compare_without_a_steady_step_exits_3(regressed: Store, run: Run) -> None:
    Job(3, GOOD, commit=9, steps=1).feed(regressed)
    code, out, _ = run("compare", "main~1", "main")
    assert code == 3
    assert out.splitlines()[2:] == ["no verdict", "why     The head run: Ranks 0-3 ran no pattern for 3 steps."]


def test_name_only_git_knows_is_asked_for_by_its_hash(store: Store, run: Run, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    hashes = [_commit(repository, text) for text in ("one", "two", "three")]
    for number, job in enumerate((BASE, HEAD)):
        _feed_at(store, job, hashes[number], hashes[:number])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repository)
        assert run("compare", "HEAD~2", "HEAD~1")[:1] == (0,)
        assert run("gate", "--base", "HEAD~2", "--head", "HEAD~1")[0] == 1
        # The newest commit never ran: no verdict for a gate, an unknown name elsewhere.
        code, out, _ = run("gate", "--base", "HEAD~1", "--head", "HEAD")
        assert (code, out) == (
            3,
            (
                f"why     The service knows no run of commit {hashes[2][:12]}, nor of a descendant of it.\n"
                "gate: exit 3 no verdict\n"
            ),
        )
        assert run("show", "HEAD")[0] == 2
        assert run("show", "nothing-like-it")[0] == 2


def test_other_projects_are_apart(regressed: Store, run: Run) -> None:
    replace(HEAD, number=5, project="other").feed(regressed)
    code, out, _ = run("runs", "--project", "other", "--json")
    assert (code, [found["id"] for found in json.loads(out)["runs"]]) == (0, [run_id(5)])


def test_reason_has_limits(regressed: Store, service: str) -> None:
    with Client(service) as client:
        for reason in ("", "   ", "x" * 1001):
            with pytest.raises(RefusedError, match="reason: String should have at"):
                client.accept("main", reason, "Ada")
        client.accept("main", "x" * 1000, "Ada")


def _commit(repository: Path, text: str) -> str:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=repository, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    if not (repository / ".git").exists():
        git("init", "-q", "-b", "main")
    (repository / "file").write_text(text)
    git("add", "file")
    git("commit", "-q", "-m", text)
    return git("rev-parse", "HEAD")


def _feed_at(store: Store, job: Job, commit: str, parents: list[str]) -> None:
    replace(job, sha=commit, parents=tuple(reversed(parents))).feed(store)
