"""Hashes of ops' outputs, on request: which op made the first different value, on which rank or commit?

A hash is computed by torch's own functions, as ``DebugMode.log_tensor_hashes`` does: ``norm`` is the L1 norm in double
precision, ``hash_tensor`` the XOR of all elements. It is the one thing in which values of tensors leave the job.

It costs what the job would pay for ``tensor.double().norm().item()`` behind every op: several reads of each output, a
copy of it in double precision, and on an accelerator a wait for the device. Steps that are not captured pay nothing.
Results stay what they are: what is hashed is only read, on the stream the op ran on, below autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from commwatch.agent.debug import torch_private as private

KINDS = ("norm", "hash_tensor")

MAX_PENDING = 10_000
"""Collectives followed until they are complete; while there are more, nothing is hashed."""

_FUNCTIONAL = ("_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::", "_dtensor::")
_SILENT = ("empty", "profiler")
"""As torch's mode has it: what these return has no value yet."""


class Hashes:
    """Hashes outputs. What a collective writes is left out until it is known to be complete; nothing is waited for."""

    def __init__(self, kind: str) -> None:
        self._hash: Callable[[torch.Tensor], Any] = private.hash_function(kind)
        self._until_waited: set[int] = set()
        self._pending: list[tuple[Any, frozenset[int]]] = []

    def of(self, name: str, args: Any, result: Any) -> Any:
        """Hashes in the containers of ``result``; None when nothing in it can be hashed.

        ``name`` is the op's ``namespace::name``; call it for each op, in order.
        """
        self._pending = [(work, storages) for work, storages in self._pending if not private.is_complete(work)]
        if name.startswith("c10d::"):
            self._issued(args, result)
        elif name.startswith("_c10d_functional::wait_tensor"):
            self._until_waited.difference_update(_storages(result))
        elif name.startswith(_FUNCTIONAL):
            self._until_waited.update(_storages(result))
        if any(word in name for word in _SILENT) or len(self._pending) > MAX_PENDING or private.is_capturing_graph():
            return None
        return self._tree(result)

    def _issued(self, args: Any, result: Any) -> None:
        works = [value for value in _leaves(result) if isinstance(value, torch.ScriptObject)]
        storages = frozenset(_storages((args, result)))
        if not works:  # nobody can say when it is complete
            self._until_waited.update(storages)
        for work in works:
            if not private.is_complete(work):
                self._pending.append((work, storages))

    def _tree(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            found = [self._tree(item) for item in value]
            return None if all(item is None for item in found) else found
        if type(value) not in private.PLAIN_TENSORS or not self._readable(value):
            return None
        try:
            with torch.no_grad():
                return self._hash(value)
        except (RuntimeError, NotImplementedError):  # such as an element type without a norm
            return None

    def _readable(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
            return False
        storage = private.storage_of(tensor)
        return storage not in self._until_waited and not any(storage in pending for _, pending in self._pending)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _storages(value: Any) -> Iterator[int]:
    for leaf in _leaves(value):
        if isinstance(leaf, torch.Tensor) and type(leaf) in private.PLAIN_TENSORS and leaf.layout is torch.strided:
            yield private.storage_of(leaf)
