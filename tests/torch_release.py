"""The torch these tests run on, for what differs between the releases that ``docs/compatibility.md`` lists."""

from __future__ import annotations

from importlib.metadata import version

RELEASE = tuple(int(part) for part in version("torch").split(".")[:2])
"""(major, minor)."""
