"""Limits of what a message may hold, and the checks that hold them. Everything an agent sends is checked here."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence, Sized

BIGINT_MAX = 2**63 - 1
INT_MAX = 2**31 - 1

NAME_CHARS = 256
"""Projects, workloads, group names, hosts, versions, branches, ops, functions."""
PATH_CHARS = 1024
"""Files, modules and lists of placements."""
TEXT_CHARS = 2000
"""Sentences: reasons, details, subjects of commits. Longer ones are cut, not refused: they identify nothing."""
MAX_ANCESTORS = 200
MAX_CALLS = 200_000
MAX_POSITIONS = 1_000_000
MAX_SIZES = 200_000
MAX_TENSORS = 10_000
MAX_DIMENSIONS = 64
MAX_LINES = 4
MAX_MODULES = 100_000
MAX_MESH_DIMENSIONS = 16
MAX_GROUPS = 4_096
MAX_DEPTH = 1_000
MAX_PARTS = 1_000
VALUE_CHARS = 200
"""An argument that is no tensor."""
MAX_VALUES = 10_000
"""Arguments, outputs and elements of lists of one captured call."""
MAX_NESTING = 8
"""Lists within lists."""
MAX_CALL_COLLECTIVES = 1_000
HASH_BYTES = 16
_COMMIT = re.compile(r"[0-9a-z][0-9a-z._+/:@-]{0,63}")


class MalformedError(Exception):
    """A message breaks the protocol. Its text says what is wrong, for the person who runs the agent."""


def require(condition: bool, what: str) -> None:
    """Raise MalformedError unless the condition holds."""
    if not condition:
        raise MalformedError(what)


def name(value: str, what: str, chars: int = NAME_CHARS) -> str:
    """An identifying text: refused when too long. Databases cannot hold NUL."""
    require(len(value) <= chars, f"{what} has {len(value)} characters, more than {chars}")
    require("\0" not in value, f"{what} holds a NUL character")
    return value


def sentence(value: str) -> str:
    """A text for people: cut when too long."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}")[:TEXT_CHARS]


def one_of(value: str, known: Sequence[str], what: str) -> str:
    """A word of a closed list."""
    require(value in known, f"{what} is {value[:40]!r}, not one of {', '.join(known)}")
    return value


def big(value: int, what: str) -> int:
    """A number that fits in a signed 64-bit column."""
    require(value <= BIGINT_MAX, f"{what} is {value}, more than {BIGINT_MAX}")
    return value


def small(value: int, what: str) -> int:
    """A number that fits in a signed 32-bit column."""
    require(value <= INT_MAX, f"{what} is {value}, more than {INT_MAX}")
    return value


def at_most(values: Sized, limit: int, what: str) -> None:
    """A list that is not longer than its limit."""
    require(len(values) <= limit, f"{len(values)} {what}, more than {limit}")


def indices(order: Sequence[int], size: int, what: str) -> tuple[int, ...]:
    """Indices into a list of that size."""
    values = tuple(order)
    if values and max(values) >= size:
        raise MalformedError(f"{what} refers to element {max(values)} of {size}")
    return values


def digest(value: bytes, what: str) -> str:
    """A hash, as the domain writes it."""
    require(len(value) == HASH_BYTES, f"{what} has {len(value)} bytes, not {HASH_BYTES}")
    return value.hex()


def optional_digest(value: bytes, what: str) -> str | None:
    """A hash; None when it is empty."""
    return digest(value, what) if value else None


def canonical_uuid(value: str, what: str) -> str:
    """A UUID in its canonical form."""
    try:
        return str(uuid.UUID(value))
    except ValueError:
        raise MalformedError(f"{what} is {value[:60]!r}, not a UUID") from None


def commit_sha(value: str, what: str) -> str:
    """A commit, or empty: a full hash of git, or what a variable names where there is no git. Case is no part of it."""
    text = value.strip().lower()
    require(not text or _COMMIT.fullmatch(text) is not None, f"{what} is {value[:70]!r}, not a commit")
    return text
