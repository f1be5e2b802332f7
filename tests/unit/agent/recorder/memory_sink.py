"""A sink that keeps what a spool would keep."""

from __future__ import annotations

import hashlib
from collections import Counter

from commwatch.agent.recorder.ranges import Content
from commwatch.agent.spool.page import Numbers
from commwatch.v1 import records_pb2


class MemorySink:
    """Keeps what a spool would keep."""

    def __init__(self) -> None:
        self.definitions: dict[bytes, tuple[int, bytes]] = {}
        self.records: list[records_pb2.StepRange] = []
        self.facts: list[records_pb2.Facts] = []
        self.completeness: list[records_pb2.Completeness] = []
        self.captures: list[records_pb2.Capture] = []
        self.counters = Numbers()
        self.request = (0, 0)

    def define(self, kind: int, content: bytes) -> bytes:
        key = hashlib.blake2b(bytes([kind]) + content, digest_size=16).digest()
        self.definitions[key] = (kind, content)
        return key

    def append(self, content: Content) -> bool:
        if isinstance(content, records_pb2.Completeness):
            self.completeness.append(content)
            return True
        if isinstance(content, records_pb2.Capture):
            self.captures.append(content)
            return True
        if isinstance(content, records_pb2.Facts):
            self.facts.append(content)
            return True
        copy = records_pb2.StepRange()
        copy.CopyFrom(content)
        self.records.append(copy)
        return True

    def publish(self, numbers: Numbers) -> None:
        self.counters = numbers

    def requested(self) -> tuple[int, int]:
        return self.request

    def newest(self) -> dict[int, records_pb2.StepRange]:
        return {record.number: record for record in self.records}

    def kinds(self) -> Counter[int]:
        return Counter(kind for kind, _ in self.definitions.values())

    def steps(self) -> list[tuple[int, int, list[str]]]:
        """(first step, last step, kinds in order) of every range, by number."""
        found = []
        for _, record in sorted(self.newest().items()):
            pattern = records_pb2.Pattern.FromString(self.definitions[record.pattern_hash][1])
            kinds = [pattern.calls[index].kind for index in pattern.order]
            found.append((record.first_step, record.last_step, kinds))
        return found
