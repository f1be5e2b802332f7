"""The identity of a run: one UUID that all ranks of a job share, found without a collective."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Mapping
from typing import Any

from commwatch.agent.recorder import torch_private


def new_run_id(unix_ms: int | None = None) -> str:
    """A UUID of version 7 (RFC 9562): a millisecond clock and 74 random bits, so that newer runs sort last."""
    milliseconds = int(time.time() * 1000) if unix_ms is None else unix_ms
    value = (milliseconds & (2**48 - 1)) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


def attempt_of(environ: Mapping[str, str]) -> int:
    """The elastic attempt, from 0."""
    count = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isascii() and count.isdecimal() else 0


def shared_run_id(store: Any, environ: Mapping[str, str], configured: str) -> tuple[str, bool]:
    """(run id, whether every rank is sure to have the same).

    ``configured`` wins. Otherwise the first rank to ask the store below every prefix decides: a launcher keeps it over
    the attempts of a job. Where the store cannot answer (the fake store), the scheduler's job names the run; without
    one the id is this process's own.
    """
    if configured:
        return str(uuid.UUID(configured)), True
    key = f"commwatch/run/{environ.get('TORCHELASTIC_RUN_ID', '')}"
    try:
        agreed = torch_private.root_store(store).compare_set(key, "", new_run_id())
        text = agreed.decode() if isinstance(agreed, bytes) else str(agreed)
        return str(uuid.UUID(text)), True
    except Exception:  # noqa: BLE001  stores fail in their own ways; the job's own use of it decides about the job
        return _without_store(environ)


def _without_store(environ: Mapping[str, str]) -> tuple[str, bool]:
    """A launcher's own run id is no help: people give the same to many launches."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return new_run_id(), False
    rest = ("SLURM_CLUSTER_NAME", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return _derived("slurm", job, *(environ.get(name, "") for name in rest)), True


def _derived(*parts: str) -> str:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()
    return str(uuid.UUID(bytes=digest, version=5))
