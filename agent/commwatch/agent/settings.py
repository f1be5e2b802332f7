"""Every setting of the agent, in one table."""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from commwatch.agent.capture.plan import Plan, parse_steps

LEVELS = ("collectives", "ops", "off")
HASHES = ("norm", "hash_tensor")
COMMIT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._+/:@-]{0,63}")
"""What the service takes as a commit: a hash of git, or what another system calls one."""


class SettingsError(ValueError):
    """A variable has a value that cannot be used. The message names it and what is expected."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. ``default`` is shown as text."""

    name: str
    default: str
    unit: str
    sentence: str


SETTINGS = (
    Setting("COMMWATCH_ENDPOINT", "", "host:port", "Where the service takes gRPC; setting it switches recording on."),
    Setting(
        "COMMWATCH_SPOOL_DIR",
        "commwatch-UID in the system's temporary folder",
        "folder",
        "Where ranks keep records until they are acknowledged; set alone, it records without sending.",
    ),
    Setting("COMMWATCH_PROJECT", "default", "name", "Project the run belongs to."),
    Setting("COMMWATCH_WORKLOAD", "the script's name", "name", "Only runs of one workload are compared."),
    Setting(
        "COMMWATCH_LEVEL",
        "collectives",
        "collectives, ops, off",
        "What is recorded; ops captures each step op by op as well, or those COMMWATCH_CAPTURE_STEPS names.",
    ),
    Setting(
        "COMMWATCH_CAPTURE_STEPS",
        "none",
        "steps",
        "Steps to capture op by op, counted from 1, such as 3,100:102; ranges include both ends.",
    ),
    Setting(
        "COMMWATCH_CAPTURE_HASHES",
        "none",
        "norm, hash_tensor",
        "Hash each op's outputs in captures; hashes leave the job, and each costs several reads of its tensor.",
    ),
    Setting(
        "COMMWATCH_RUN_ID",
        "agreed on by the ranks",
        "UUID",
        "Identity of one launch, equal on all its ranks; a new one each time.",
    ),
    Setting("COMMWATCH_COMMIT", "from CI variables or git", "hash", "Commit of the program."),
    Setting("COMMWATCH_BRANCH", "from CI variables or git", "name", "Branch of the program."),
    Setting("COMMWATCH_SPOOL_MAX_BYTES", "67108864", "bytes", "Largest spool of one rank; beyond it records drop."),
    Setting(
        "COMMWATCH_DEADLINE_S", "30", "seconds", "How long the forwarder goes on after its rank ended, at most an hour."
    ),
    Setting("COMMWATCH_HEARTBEAT_S", "1", "seconds", "Time between signs of life, from 0.05 to 15."),
)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Valid settings. ``endpoint`` is None when records are only spooled; empty texts mean: found out later."""

    endpoint: str | None
    spool_dir: Path
    project: str
    workload: str
    level: str
    capture: Plan
    run_id: str
    spool_max_bytes: int
    deadline_s: float
    heartbeat_s: float

    def rank_directory(self, run_id: str, attempt: int, rank: int) -> Path:
        """Folder of one rank's spool."""
        return self.spool_dir / run_id / f"{attempt}-{rank}"


def load(environ: Mapping[str, str]) -> AgentSettings:
    """Settings from variables. Raises SettingsError."""
    endpoint = environ.get("COMMWATCH_ENDPOINT", "")
    if endpoint:
        _check_endpoint(endpoint)
    default_spool = str(Path(tempfile.gettempdir()) / f"commwatch-{os.getuid()}")
    level = environ.get("COMMWATCH_LEVEL") or "collectives"
    if level not in LEVELS:
        raise SettingsError(f"COMMWATCH_LEVEL is {level!r}: expected one of {', '.join(LEVELS)}")
    run_id = environ.get("COMMWATCH_RUN_ID", "")
    if run_id:
        try:
            run_id = str(uuid.UUID(run_id))
        except ValueError:
            raise SettingsError(f"COMMWATCH_RUN_ID is {run_id!r}: expected a UUID, such as `uuidgen` prints") from None
    commit = environ.get("COMMWATCH_COMMIT", "").strip()
    if commit and not COMMIT.fullmatch(commit):
        raise SettingsError(
            f"COMMWATCH_COMMIT is {commit[:70]!r}: expected a commit, such as `git rev-parse HEAD` prints"
        )
    _name(environ, "COMMWATCH_BRANCH")
    return AgentSettings(
        endpoint=endpoint or None,
        spool_dir=Path(environ.get("COMMWATCH_SPOOL_DIR") or default_spool).absolute(),
        project=_name(environ, "COMMWATCH_PROJECT") or "default",
        workload=_name(environ, "COMMWATCH_WORKLOAD"),
        level=level,
        capture=_plan(environ, level),
        run_id=run_id,
        spool_max_bytes=int(_number(environ, "COMMWATCH_SPOOL_MAX_BYTES", 64 * 1024**2, least=64 * 1024, most=1024**4)),
        deadline_s=_number(environ, "COMMWATCH_DEADLINE_S", 30, least=0, most=3600),
        heartbeat_s=_number(environ, "COMMWATCH_HEARTBEAT_S", 1, least=0.05, most=15),
    )


def _plan(environ: Mapping[str, str], level: str) -> Plan:
    hashes = environ.get("COMMWATCH_CAPTURE_HASHES", "").strip()
    hashes = "" if hashes == "none" else hashes
    if hashes and hashes not in HASHES:
        raise SettingsError(f"COMMWATCH_CAPTURE_HASHES is {hashes[:40]!r}: expected one of {', '.join(HASHES)}")
    text = environ.get("COMMWATCH_CAPTURE_STEPS", "").strip()
    if not text:
        return Plan(every=level == "ops", hashes=hashes)
    try:
        return Plan(parse_steps(text), hashes=hashes)
    except ValueError as error:
        raise SettingsError(f"COMMWATCH_CAPTURE_STEPS: {error}; expected steps such as 3,100:102") from None


def _check_endpoint(endpoint: str) -> None:
    host, colon, port = endpoint.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    valid_host = bool(host) and (bracketed or ":" not in host) and not re.search(r"[/\s@]", host)
    # isdecimal alone takes digits of every script, and int() any number of them.
    valid_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536
    if not (colon and valid_host and valid_port):
        raise SettingsError(f"COMMWATCH_ENDPOINT is {endpoint!r}: expected host:port, such as 127.0.0.1:8431")


def _name(environ: Mapping[str, str], variable: str) -> str:
    value = environ.get(variable, "").strip()
    if len(value) > 200 or not value.isprintable():
        shown = f"{value[:40]!r}..." if len(value) > 40 else repr(value)
        raise SettingsError(f"{variable} is {shown}: expected at most 200 printable characters")
    return value


def _number(environ: Mapping[str, str], variable: str, default: float, *, least: float, most: float) -> float:
    text = environ.get(variable, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        limits = f"{least:.15g} to {most:.15g}"
        raise SettingsError(f"{variable} is {text!r}: expected a number from {limits}")
    return value


def as_markdown() -> str:
    """``docs/agent-settings.md``, whole."""
    rows = [
        "# Settings of the agent",
        "",
        "Environment variables of the job. With neither `COMMWATCH_ENDPOINT` nor `COMMWATCH_SPOOL_DIR` set, nothing is",
        "installed. `commwatch doctor` says what they amount to.",
        "",
        "| variable | default | unit | |",
        "|---|---|---|---|",
    ]
    rows += [f"| `{row.name}` | {row.default or 'unset'} | {row.unit} | {row.sentence} |" for row in SETTINGS]
    return "\n".join(rows) + "\n"
