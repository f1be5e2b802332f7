"""Proves, before anything is recorded, that interposition works in this process.

One call goes through the dispatcher to a group of the agent's own: one rank, in memory, registered nowhere. Nothing is
sent, and nothing is left of it. It takes a tenth of a millisecond, once the kernels are in place that recording needs.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

from commwatch.agent.recorder import interpose, torch_private
from commwatch.agent.recorder.catalog import Op
from commwatch.agent.recorder.codes import raised_by_signal
from commwatch.agent.recorder.features import FEATURES

SELF_TEST = next(feature for feature in FEATURES if feature.name == "self-test")
EXPECTED = "c10d::allreduce_"


def failure(then: interpose.Sink | None = None) -> str:
    """What is wrong, in words; empty when a call was seen exactly once and came through unchanged.

    ``then`` is shown collectives from there on when nothing is wrong: the kernels are put in place once for both.
    Proves nothing while they are in place already, whose sinks would take the call for the job's, and nothing on a
    torch that lacks what the proof needs.
    """
    if interpose.installed() or torch_private.lacks(SELF_TEST.needs):
        if then is not None:
            interpose.add(then)
        return ""
    seen: list[str] = []
    places: list[int] = []

    asking = [get_ident()]

    def see(op: Op, args: tuple[Any, ...]) -> None:
        if get_ident() not in asking:  # another thread's call, or one after the proof
            return
        seen.append(op.name)
        if op.name == EXPECTED:
            places.extend(tensor.data_ptr() for tensor in args[op.inputs[0]])

    interpose.add(see)
    try:
        issue, tensor = torch_private.lonely_all_reduce()
        before = tensor.tolist()
        finished = issue()
        wrong = _difference(seen, places == [tensor.data_ptr()], finished and tensor.tolist() == before)
        if not wrong and then is not None:
            interpose.add(then)
    except Exception as error:  # reported in one line; the job goes on without a recorder
        if raised_by_signal(error):
            raise
        return f"a call through the dispatcher raised {type(error).__name__}: {error}"
    finally:
        asking.clear()
        interpose.remove(see)
    return wrong


def _difference(seen: list[str], same_arguments: bool, same_result: bool) -> str:
    if not seen:
        return "a call through the dispatcher was not seen"
    if seen != [EXPECTED]:
        return f"one {EXPECTED} was seen as {', '.join(seen)}"
    if not same_arguments:
        return "a call was shown with other tensors than its own"
    if not same_result:
        return "a call came back changed"
    return ""
