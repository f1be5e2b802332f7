"""Under which op a collective is counted: the names torch's CommDebugMode uses, and those it has none for."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers torch.ops.c10d_functional
from torch.distributed.tensor import _collective_utils  # noqa: F401  registers torch.ops._dtensor

from commwatch.agent.debug import torch_private
from commwatch.agent.debug.comm_frames import local
from commwatch.agent.recorder import catalog
from commwatch.agent.recorder.torch_private import op_names

_FUNCTIONAL = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_NOT_COLLECTIVES = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
_SHARD_DIM = "_dtensor::shard_dim_alltoall"
_IN_PLACE = ("_out", "_")


def _functional_key(namespace: str, name: str) -> Any:
    for suffix in ("", *_IN_PLACE):
        if name.endswith(suffix) and hasattr(torch.ops.c10d_functional, name.removesuffix(suffix)):
            return getattr(torch.ops.c10d_functional, name.removesuffix(suffix))
    return _packet(f"{namespace}::{name}")


def _packet(full: str) -> Any:
    namespace, _, name = full.partition("::")
    return getattr(getattr(torch.ops, namespace), name)


def _functional_keys() -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for full in op_names(_FUNCTIONAL):
        namespace, _, name = full.partition(".")[0].partition("::")
        if name not in _NOT_COLLECTIVES:
            keys[f"{namespace}::{name}"] = _functional_key(namespace, name)
    keys[_SHARD_DIM] = _packet(_SHARD_DIM)
    return keys


class Keys:
    """Packets by dispatcher name, learned once."""

    def __init__(self) -> None:
        self.functional = _functional_keys()
        self._plain: dict[str, Any] = {}
        for _, op in catalog.all_ops():
            self._plain[op.name] = _packet(op.name)
        self._by_packet = {_packet(name): key for name, key in self.functional.items()}
        self._by_packet.update({packet: packet for packet in self._plain.values()})

    def registry(self) -> set[Any]:
        """Packets of functional collectives, native and as keys."""
        return {_packet(name) for name in self.functional} | set(self.functional.values())

    def of_packet(self, packet: Any) -> Any:
        """Key of the op that is dispatched; None when it is no collective."""
        return self._by_packet.get(packet)

    def of_call(self, op: catalog.Op, frame: FrameType | None) -> Any:
        """Key of a call that reaches a backend; ``frame`` is the kernel's that shows it.

        The call belongs to the functional op that the nearest Python frame runs; else it was made as it is.
        """
        caller = frame.f_back if frame is not None else None
        if caller is not None and torch_private.runs_an_op(caller.f_code):
            name = torch_private.name_of(local(caller, "self"))
            if name in self.functional:
                return self.functional[name]
        return self._plain.get(op.name)
