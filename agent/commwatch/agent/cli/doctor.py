"""Say, in words, whether this Python would record and where it would send."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING

from commwatch.agent.settings import AgentSettings, SettingsError, load
from commwatch.agent.spool.folder import make_spool_dir

if TYPE_CHECKING:
    import grpc

_PROBE = (
    "import json, sys\n"
    "import torch, torch.distributed as dist\n"
    "from commwatch.agent.recorder import torch_private\n"
    "missing = torch_private.missing()\n"
    "if not missing:\n"
    "    from commwatch.agent.recorder import features, selftest\n"
    "print(json.dumps({'torch': torch.__version__, 'missing': missing,\n"
    "                  'reduced': '' if missing else features.reduced_text(features.EVERY),\n"
    "                  'self_test': '' if missing else selftest.failure(),\n"
    "                  'armed': 'commwatch.agent.activation' in sys.modules}))\n"
)
PROBE_LIMIT_S = 120
DIAL_LIMIT_S = 3
# grpc.health.v1.HealthCheckRequest and -Response by hand: the agent does not depend on their package.
_INGEST = b"commwatch.v1.IngestService"
_HEALTH_OF_INGEST = b"\x0a" + bytes([len(_INGEST)]) + _INGEST
_SERVING = "0801"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``advice`` is the next command when it is not ``ok``."""

    name: str
    ok: bool
    text: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """0: this Python would record and send. 1: it would not, for the reasons printed."""
    findings = examine(os.environ)
    good = all(finding.ok for finding in findings)
    if arguments.json:
        text = json.dumps(
            {"version": 1, "would_record": good, "findings": [asdict(found) for found in findings]}, indent=2
        )
    else:
        lines = [f"{'ok ' if found.ok else 'NO '} {found.name}: {found.text}" for found in findings]
        lines += [f"    -> {found.advice}" for found in findings if found.advice and not found.ok]
        verdict = "would record and send" if good else "would NOT record and send as things are"
        text = "\n".join([*lines, f"\nThis Python ({sys.executable}) {verdict}."])
    print(text)  # noqa: T201  a command's output
    return 0 if good else 1


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Everything that decides whether a rank of this Python would be recorded."""
    findings = [_installed(), _entry_point(), _autoload(environ)]
    try:
        settings = load(environ)
    except SettingsError as error:
        return [*findings, Finding("settings", ok=False, text=str(error), advice="correct the variable")]
    asked = bool(environ.get("COMMWATCH_ENDPOINT") or environ.get("COMMWATCH_SPOOL_DIR"))
    findings.append(
        Finding(
            "settings",
            ok=asked and settings.level != "off",
            text=_asked(settings, asked),
            advice="export COMMWATCH_ENDPOINT=127.0.0.1:8431 (and unset COMMWATCH_LEVEL)",
        )
    )
    findings += _torch(environ, asked=asked)
    findings.append(_spool(settings))
    if settings.endpoint is not None:
        findings.append(_service(settings.endpoint))
    return findings


def _asked(settings: AgentSettings, asked: bool) -> str:
    if not asked:
        return "neither COMMWATCH_ENDPOINT nor COMMWATCH_SPOOL_DIR is set: recording is off"
    if settings.level == "off":
        return "COMMWATCH_LEVEL=off: recording is off"
    target = f"sends to {settings.endpoint}" if settings.endpoint else "spools without sending"
    return f"level {settings.level}, project {settings.project}, {target}"


def _installed() -> Finding:
    try:
        return Finding("commwatch", ok=True, text=f"version {version('commwatch')}")
    except PackageNotFoundError:
        return Finding("commwatch", ok=False, text="not installed here", advice="pip install commwatch")


def _entry_point() -> Finding:
    found = any(point.name == "commwatch" for point in entry_points(group="torch.backends"))
    text = "torch.backends entry point found" if found else "this environment has no torch.backends entry point of it"
    return Finding("entry point", ok=found, text=text, advice="pip install --force-reinstall commwatch")


def _autoload(environ: Mapping[str, str]) -> Finding:
    value = environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    off = value != "1"  # torch takes every other value for off
    text = f"TORCH_DEVICE_BACKEND_AUTOLOAD={value} switches entry points off" if off else "torch loads entry points"
    return Finding(
        "autoload", ok=not off, text=text, advice="unset TORCH_DEVICE_BACKEND_AUTOLOAD, or `commwatch run -- CMD`"
    )


def _torch(environ: Mapping[str, str], *, asked: bool) -> list[Finding]:
    """Whether torch can be recorded there, and what the self-test that each rank runs says."""
    try:
        finished = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=PROBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [Finding("torch", ok=False, text=f"import torch takes longer than {PROBE_LIMIT_S} s")]
    if finished.returncode:
        last = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        return [Finding("torch", ok=False, text=f"import torch fails: {last}", advice="install torch >= 2.9 here")]
    found = json.loads(finished.stdout.strip().splitlines()[-1])
    if found["missing"]:
        lacking = f"torch {found['torch']} lacks {', '.join(found['missing'])}"
        return [Finding("torch", ok=False, text=lacking, advice="use torch >= 2.9")]
    has = f"torch {found['torch']} has what recording needs"
    if found["reduced"]:
        has += f" ({found['reduced']})"
    return [_armed(has, armed=found["armed"], asked=asked), _self_test(found["self_test"])]


def _armed(has: str, *, armed: bool, asked: bool) -> Finding:
    if armed:
        return Finding("torch", ok=True, text=f"{has} and waits for a process group")
    return Finding(
        "torch", ok=not asked, text=f"{has} but the agent is not armed there", advice="correct what is named above"
    )


def _self_test(wrong: str) -> Finding:
    text = wrong or "a call through the dispatcher was seen once and came through unchanged"
    advice = 'another package may have registered kernels for c10d: look for torch.library.Library("c10d", "IMPL")'
    return Finding("self-test", ok=not wrong, text=text, advice=advice)


def _spool(settings: AgentSettings) -> Finding:
    folder = settings.spool_dir
    try:
        make_spool_dir(folder)
        with tempfile.TemporaryFile(dir=folder):
            return Finding("spool", ok=True, text=f"{folder} is writable")
    except OSError as error:
        return Finding(
            "spool", ok=False, text=f"{folder}: {error.strerror}", advice="set COMMWATCH_SPOOL_DIR to a local folder"
        )


def _service(endpoint: str) -> Finding:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=DIAL_LIMIT_S):
            pass
    except OSError as error:
        return Finding("service", ok=False, text=f"{endpoint}: {error.strerror or error}", advice="commwatch serve")
    import grpc

    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(endpoint, options=options) as channel:
        ask = channel.unary_unary(
            "/grpc.health.v1.Health/Check", request_serializer=bytes, response_deserializer=bytes.hex
        )
        try:
            answer = ask(_HEALTH_OF_INGEST, timeout=DIAL_LIMIT_S)
        except grpc.RpcError as error:
            return _no_service(endpoint, error)
    if answer != _SERVING:
        return Finding("service", ok=False, text=f"{endpoint} answers that it is stopping", advice="commwatch serve")
    return Finding("service", ok=True, text=f"{endpoint} answers")


def _no_service(endpoint: str, error: grpc.RpcError) -> Finding:
    import grpc

    code = error.code() if isinstance(error, grpc.Call) else None
    if code in {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND}:
        what = "speaks gRPC but is no commwatch service"
    else:
        what = "takes connections but speaks no gRPC"
    advice = "check COMMWATCH_ENDPOINT: the gRPC port of commwatch serve, not the HTTP one"
    return Finding("service", ok=False, text=f"{endpoint} {what}", advice=advice)
