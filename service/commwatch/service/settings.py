"""Every setting of the service, in one table: name, default, unit, one sentence each."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

_PREFIX = "COMMWATCH_"


def _setting(default: Any, unit: str, sentence: str, **limits: Any) -> Any:
    return Field(default, description=sentence, json_schema_extra={"unit": unit}, **limits)


class Settings(BaseSettings):
    """Read from the environment: ``COMMWATCH_DB`` sets ``db``. Options of ``commwatch serve`` win."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="ignore", frozen=True)

    db: str = _setting(
        "", "path or URL", "Database; empty for the SQLite file commwatch.db in the user's data directory."
    )
    grpc_listen: str = _setting("127.0.0.1:8431", "host:port", "Where agents report; port 0 takes a free one.")
    http_listen: str = _setting(
        "127.0.0.1:8430", "host:port", "Where people and the command line ask; port 0 takes a free one."
    )
    insecure: bool = _setting(
        False, "", "Allow other addresses than loopback although nothing is encrypted and nobody is asked who they are."
    )
    lost_after_s: float = _setting(30.0, "s", "Silence after which a rank counts as lost.", gt=0, le=86_400)
    stream_silence_s: float = _setting(120.0, "s", "Silence after which a stream is closed.", gt=0, le=86_400)
    max_message_bytes: int = _setting(
        8 * 1024 * 1024, "bytes", "Largest frame or definition taken from an agent.", ge=65_536, le=1024**3
    )
    max_streams: int = _setting(8_192, "streams", "Ranks that may report at the same time.", ge=1, le=1_000_000)
    max_waiting_writes: int = _setting(
        4_096, "writes", "Writes that may wait for the database before agents are told to wait.", ge=1, le=1_000_000
    )
    known_definitions: int = _setting(
        100_000, "definitions", "Definitions remembered as stored, to spare the database the question.", ge=1
    )
    back_off_ms: int = _setting(1_000, "ms", "How long agents are told to wait when nothing can be stored.", ge=1)
    evaluate_every_s: float = _setting(1.0, "s", "Least time between two comparisons of a running run.", gt=0)
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "", "Least severe event that is logged.")


def markdown_rows() -> list[str]:
    """The rows of the documentation's table: variable, default, unit, sentence."""
    rows = []
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        unit = extra["unit"] if isinstance(extra, dict) else ""
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        shown = f"`{default}`" if default else "empty"
        rows.append(f"| `{_PREFIX}{name.upper()}` | {shown} | {unit} | {field.description} |")
    return rows
