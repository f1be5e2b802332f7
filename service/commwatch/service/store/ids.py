"""Ids made by the service: UUIDv7, so that they sort by the time they were made."""

from __future__ import annotations

import secrets
import uuid


def uuid7(unix_ns: int) -> str:
    """A UUIDv7 (RFC 9562) for a time, as canonical text: 48 bits of milliseconds, 74 random bits."""
    value = (unix_ns // 1_000_000 & (1 << 48) - 1) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))
