"""A call's identity over ranks and commits."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from commwatch.service.domain.records import Call, Cause, Group


def fold(module: str) -> str:
    """Replace every layer number: ``layers.3.wo`` becomes ``layers.*.wo``."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


@dataclass(frozen=True, slots=True)
class Site:
    """Phase, kind, group, folded module, cause and element type: no line, no rank, no layer number."""

    phase: str
    kind: str
    group: Group
    module: str
    cause: Cause | None
    dtype: str

    @property
    def hash(self) -> str:
        """32 hexadecimal characters over all fields, stable between releases."""
        cause = self.cause and [self.cause.src, self.cause.dst, self.cause.implicit, self.cause.op]
        group = [self.group.name, self.group.size, self.group.stride]
        content = json.dumps([self.phase, self.kind, group, self.module, cause, self.dtype], separators=(",", ":"))
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def site_of(call: Call) -> Site:
    """Drop what is not part of the identity: the raw op and the layer numbers."""
    return Site(call.phase, call.kind, call.group, fold(call.module), call.cause, call.dtype)
