"""What is known of an op before its arguments are: learned once, used at each of its calls."""

from __future__ import annotations

from typing import Any

from commwatch.agent.debug import torch_private as private
from commwatch.agent.debug.group_arguments import GroupArguments

RANGE = "range"
ANNOTATION = "annotation"
DEVICE = "device"
SUBGRAPH = "subgraph"


MAX_KNOWN = 50_000
"""Ops known at once: more than torch has. Beyond it (a program that defines ops for ever) the table starts anew."""


class OpFacts:
    """Whether an op is recorded, where its process groups stand, and how it is handled (``special``)."""

    __slots__ = ("group", "op", "recorded", "special")

    def __init__(self, op: Any) -> None:
        self.op = op
        self.group: tuple[int, ...] = ()
        self.special = ""
        name = str(op)
        if isinstance(op, private.Operator):
            name = op.__qualname__
            self.group = GroupArguments.positions(op)
            if op is private.ENTER_RANGE or op is private.EXIT_RANGE:
                self.special = RANGE
            elif private.ANNOTATE is not None and op is private.ANNOTATE.default:
                self.special = ANNOTATION
            elif op is private.DEVICE_QUERY:
                self.special = DEVICE
        elif isinstance(op, private.HigherOrder) and private.subgraph_handler(op) is not None:
            self.special = SUBGRAPH
        self.recorded = not name.startswith("profiler::_record_function")


KNOWN: dict[int, OpFacts] = {}
"""By ``id(op)``, for every recorder of the process; holds the op, so that an id is never reused for another."""


def learn(op: Any) -> OpFacts:
    """Facts of an op that is not known yet."""
    if len(KNOWN) >= MAX_KNOWN:
        KNOWN.clear()
    facts = KNOWN[id(op)] = OpFacts(op)
    return facts
