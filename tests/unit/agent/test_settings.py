from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from commwatch.agent.capture.plan import Plan
from commwatch.agent.settings import SETTINGS, AgentSettings, SettingsError, as_markdown, load

ROOT = Path(__file__).parents[3]


def test_nothing_set_means_defaults() -> None:
    assert load({}) == AgentSettings(
        endpoint=None,
        spool_dir=Path(tempfile.gettempdir()) / f"commwatch-{os.getuid()}",
        project="default",
        workload="",
        level="collectives",
        capture=Plan(),
        run_id="",
        spool_max_bytes=67_108_864,
        deadline_s=30,
        heartbeat_s=1,
    )


def test_every_variable_is_read(tmp_path: Path) -> None:
    variables = {
        "COMMWATCH_ENDPOINT": "[::1]:8431",
        "COMMWATCH_SPOOL_DIR": str(tmp_path),
        "COMMWATCH_PROJECT": " llm ",
        "COMMWATCH_WORKLOAD": "pretrain",
        "COMMWATCH_LEVEL": "off",
        "COMMWATCH_CAPTURE_STEPS": "3, 100:102",
        "COMMWATCH_CAPTURE_HASHES": "hash_tensor",
        "COMMWATCH_RUN_ID": "01938DDD000070008000000000000001",
        "COMMWATCH_COMMIT": "abc123",
        "COMMWATCH_BRANCH": "topic/x",
        "COMMWATCH_SPOOL_MAX_BYTES": "65536",
        "COMMWATCH_DEADLINE_S": "0",
        "COMMWATCH_HEARTBEAT_S": "0.5",
    }
    assert set(variables) == {row.name for row in SETTINGS}
    assert load(variables) == AgentSettings(
        endpoint="[::1]:8431",
        spool_dir=tmp_path,
        project="llm",
        workload="pretrain",
        level="off",
        capture=Plan(((3, 3), (100, 102)), hashes="hash_tensor"),
        run_id="01938ddd-0000-7000-8000-000000000001",
        spool_max_bytes=65536,
        deadline_s=0,
        heartbeat_s=0.5,
    )


def test_hashes_are_off_unless_a_known_kind_is_asked_for() -> None:
    assert load({"COMMWATCH_CAPTURE_HASHES": "none"}).capture.hashes == ""
    assert load({"COMMWATCH_CAPTURE_HASHES": " norm "}).capture.hashes == "norm"
    assert load({"COMMWATCH_CAPTURE_HASHES": "norm", "COMMWATCH_LEVEL": "ops"}).capture == Plan(
        every=True, hashes="norm"
    )
    with pytest.raises(SettingsError, match="COMMWATCH_CAPTURE_HASHES is 'md5': expected one of norm, hash_tensor"):
        load({"COMMWATCH_CAPTURE_HASHES": "md5"})


def test_the_level_ops_captures_each_step_or_those_that_are_named() -> None:
    assert load({"COMMWATCH_LEVEL": "ops"}).capture == Plan(every=True)
    assert load({"COMMWATCH_LEVEL": "ops", "COMMWATCH_CAPTURE_STEPS": "2"}).capture == Plan(((2, 2),))
    assert [step for step in range(1, 9) if Plan(((2, 3), (7, 7))).wants(step)] == [2, 3, 7]


def test_a_variable_set_to_nothing_is_not_set() -> None:
    assert load({row.name: "" for row in SETTINGS}) == load({})


def test_a_relative_spool_folder_means_the_one_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load({"COMMWATCH_SPOOL_DIR": "spool"})
    assert settings.rank_directory("run", 2, 7) == tmp_path / "spool" / "run" / "2-7"


ENDPOINT = "COMMWATCH_ENDPOINT is {!r}: expected host:port, such as 127.0.0.1:8431"
NAME = "{} is {}: expected at most 200 printable characters"
NUMBER = "{} is {!r}: expected a number from {}"


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        *(
            ("COMMWATCH_ENDPOINT", value, ENDPOINT.format(value))
            for value in (
                *("localhost", ":8431", "host:", "host:0", "host:65536", "host:+1", "host:8²", "host:٣", "::1:8431"),
                *("http://host:8431", "host name:8431", "user@host:8431", "host:8431\n", "host:" + "1" * 5000),
            )
        ),
        ("COMMWATCH_LEVEL", "all", "COMMWATCH_LEVEL is 'all': expected one of collectives, ops, off"),
        *(
            ("COMMWATCH_CAPTURE_STEPS", value, f"COMMWATCH_CAPTURE_STEPS: {what}; expected steps such as 3,100:102")
            for value, what in (
                ("a", "'a' is no step and no range such as 100:102"),
                ("1,,2", "'' is no step and no range such as 100:102"),
                ("5:3", "'5:3' must run upwards from 1 on"),
                ("0", "'0' must run upwards from 1 on"),
                (",".join(["1"] * 101), "101 ranges, more than 100"),
            )
        ),
        ("COMMWATCH_RUN_ID", "7", "COMMWATCH_RUN_ID is '7': expected a UUID, such as `uuidgen` prints"),
        ("COMMWATCH_PROJECT", "a\tb", NAME.format("COMMWATCH_PROJECT", r"'a\tb'")),
        ("COMMWATCH_WORKLOAD", "w" * 201, NAME.format("COMMWATCH_WORKLOAD", f"{'w' * 40!r}...")),
        ("COMMWATCH_BRANCH", "b\0", NAME.format("COMMWATCH_BRANCH", r"'b\x00'")),
        *(
            (
                "COMMWATCH_COMMIT",
                value,
                f"COMMWATCH_COMMIT is {value[:70]!r}: expected a commit, such as `git rev-parse HEAD` prints",
            )
            for value in ("HEAD~1", "--output=x", "two words", "f" * 65)
        ),
        *(
            (
                "COMMWATCH_SPOOL_MAX_BYTES",
                value,
                NUMBER.format("COMMWATCH_SPOOL_MAX_BYTES", value, "65536 to 1099511627776"),
            )
            for value in ("64MB", "65535", "1e13", "nan", "inf", "-1")
        ),
        ("COMMWATCH_DEADLINE_S", "3601", NUMBER.format("COMMWATCH_DEADLINE_S", "3601", "0 to 3600")),
        ("COMMWATCH_HEARTBEAT_S", "0", NUMBER.format("COMMWATCH_HEARTBEAT_S", "0", "0.05 to 15")),
    ],
)
def test_a_value_that_cannot_be_used_is_named(variable: str, value: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({variable: value})
    assert str(caught.value) == sentence


def test_the_documentation_is_the_table() -> None:
    assert (ROOT / "docs" / "agent-settings.md").read_text() == as_markdown()
