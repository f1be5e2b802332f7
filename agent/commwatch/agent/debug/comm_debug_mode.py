"""``CommDebugMode``: what torch's class of this name counts and shows, and right where that one is not."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from commwatch.agent.debug import torch_private
from commwatch.agent.debug.comm_frames import traced
from commwatch.agent.debug.comm_keys import Keys
from commwatch.agent.debug.comm_modules import GLOBAL, CommModuleTracker
from commwatch.agent.debug.comm_report import Report
from commwatch.agent.recorder import interpose
from commwatch.agent.recorder import torch_private as recorder_private
from commwatch.agent.recorder.catalog import Op
from commwatch.agent.recorder.codes import raised_by_signal
from commwatch.agent.recorder.local import RecordError

_log = logging.getLogger(__name__)
_COLOUR = re.compile(r"\x1B\[[0-?]*[ -/]*[@-~]")

Counts = dict[str, dict[str, "defaultdict[Any, int]"]]
Operation = dict[str, Any]


class _Thread(threading.local):
    """``reached``: whether a collective reached a backend while the op dispatched last ran on this thread."""

    def __init__(self) -> None:
        self.reached = False


class CommDebugMode(TorchDispatchMode):
    """Counts the collectives of a block, by op and by module, and lists the ops of each module.

    A drop-in for ``torch.distributed.tensor.debug.CommDebugMode``: same attributes, methods, keys and texts. Entering
    it again starts anew; inside itself it goes on.

    Every collective that reaches a backend is counted once, from wherever it is issued: other threads, compiled
    regions, tensor subclasses, C++. Its key is the ``torch.ops.c10d_functional`` packet when the nearest Python frame
    runs a functional op, in eager code and in compiled regions; else the packet of the op that reached the backend,
    such as ``torch.ops.c10d.allreduce_``. Ops torch's class does not know (``send``, ``recv_``, ``barrier``) count too.
    Collectives of fake tensors reach no backend and are counted when they are dispatched, but not while a graph is
    traced.

    A collective in backward, and in a forward that is run again for it, counts as ``backward`` under the module whose
    forward made the autograd node, or whose forward runs again. ``comm_module_own_counts`` holds what each module
    issued itself; ``comm_module_counts`` adds what the modules below it issued, so that ``Global`` has the total.

    Raises RecordError on entry when this torch lacks what counting needs.
    """

    MAX_OPERATIONS = 200_000
    """Operations listed in one block; of later ones only the number is kept, by module, and shown by the table."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's base is untyped
        self.supports_higher_order_operators = True
        self.comm_counts: dict[Any, int] = defaultdict(int)
        self.comm_module_counts: Counts = {}
        self.comm_module_own_counts: Counts = {}
        self.comm_module_operation_counts: dict[str, dict[str, list[Operation]]] = {}
        self.operations_left_out: dict[str, int] = {}
        self.advanced_module_tracker = CommModuleTracker(self._failed)
        self._keys = Keys()
        self.comm_registry = self._keys.registry()
        self._thread = _Thread()
        self._lock = threading.RLock()
        self._depth = 0
        self._listed = 0
        self._warned = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The mode leaves ``torch.compile`` on: compiled regions are counted at run time, their tracing is not."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Whether torch wraps the handler, which loads the compiler at the first op. A mark on its code does the same.
        return not torch_private.CAN_SKIP_FRAMES

    def __enter__(self) -> CommDebugMode:
        missing = recorder_private.missing() + torch_private.missing_for_counts()
        if missing:
            raise RecordError(f"cannot count collectives: this torch lacks {', '.join(missing)}")
        if self._depth == 0:
            self._clear()
            self.advanced_module_tracker.clear()
            try:
                self.advanced_module_tracker.install()
                interpose.add(self._see)
                super().__enter__()  # type: ignore[no-untyped-call]  # torch's base is untyped
            except BaseException:
                self._leave()
                raise
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        try:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch's base is untyped
        finally:
            self._leave()

    def _leave(self) -> None:
        interpose.remove(self._see)
        self.advanced_module_tracker.remove()

    def _clear(self) -> None:
        self.comm_counts.clear()
        for counts in (self.comm_module_counts, self.comm_module_own_counts):
            counts.clear()
            _of_module(counts, GLOBAL)
        self.comm_module_operation_counts.clear()
        self.operations_left_out.clear()
        self._listed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch_private.HigherOrder):
            return func(*args, **kwargs)
        dtensor = any(issubclass(kind, torch_private.DTensor) for kind in types)
        if self.advanced_module_tracker.quiet:
            return NotImplemented if dtensor else func(*args, **kwargs)
        if dtensor:  # its own ops are dispatched here again
            self._observe(func, sys._getframe(1), args, types, True)
            return NotImplemented
        key = self._keys.of_packet(torch_private.packet_of(func))
        thread = self._thread
        before, thread.reached = thread.reached, False
        try:
            out = func(*args, **kwargs)
            uncounted = key is not None and not thread.reached
        finally:
            thread.reached |= before
        self._observe(func, sys._getframe(1), args, types, False, key if uncounted else None)
        return out

    def _observe(self, func: Any, frame: FrameType, args: Any, types: Any, dtensor: bool, key: Any = None) -> None:
        """List an op; count it under ``key``, as a collective that no backend was to see: of fake tensors."""
        try:
            fake = not dtensor and torch_private.computes_fakes(args, types)
            name, in_backward, again = self.advanced_module_tracker.locate(frame)
            if key is not None and not (fake and traced(frame)):
                self._count(key, name, in_backward)
            if not fake:
                self._list(name, _operation(func, args if dtensor else (), in_backward, again))
        except Exception as error:  # noqa: BLE001  the mode may fail, the job may not
            self._failed(error)

    def _see(self, op: Op, _args: tuple[Any, ...]) -> None:
        """A collective reaches a backend."""
        self._thread.reached = True
        try:
            frame = sys._getframe(1)
            key = self._keys.of_call(op, frame)
            name, in_backward, _ = self.advanced_module_tracker.locate(frame)
            self._count(key, name, in_backward)
        except Exception as error:  # noqa: BLE001  the mode may fail, the collective may not
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if raised_by_signal(error):
            raise error
        if not self._warned:
            self._warned = True
            _log.warning("CommDebugMode missed an op and goes on; please report this", exc_info=error)

    def _count(self, key: Any, name: str, in_backward: bool) -> None:
        direction = "backward" if in_backward else "forward"
        with self._lock:
            self.comm_counts[key] += 1
            _of_module(self.comm_module_own_counts, name)[direction][key] += 1
            for above in {name, GLOBAL} | self.advanced_module_tracker.module_parents_dict[name]:
                _of_module(self.comm_module_counts, above)[direction][key] += 1

    def _list(self, name: str, operation: Operation) -> None:
        with self._lock:
            if self._listed >= self.MAX_OPERATIONS:
                self.operations_left_out[name] = self.operations_left_out.get(name, 0) + 1
                return
            self._listed += 1
            of_module = self.comm_module_operation_counts.setdefault(name, {"operations_list": []})
            of_module["operations_list"].append(operation)

    def get_total_counts(self) -> int:
        """Number of collectives."""
        return sum(self.comm_counts.values())

    def get_comm_counts(self) -> dict[Any, int]:
        """Number of collectives by op; an op that never ran gives 0."""
        return self.comm_counts

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """Parameters' data by module and name, as they were at the module's last call in forward."""
        return self.advanced_module_tracker.module_parameters_dict

    def get_sharding_info(self) -> dict[str, Any]:
        """Placements of each parameter that is a DTensor, by the parameter's full name."""
        return self.advanced_module_tracker.sharding_dict

    def _report(self) -> Report:
        tracker = self.advanced_module_tracker
        return Report(
            tracker.module_helper_dict,
            tracker.parent_dict,
            self.comm_module_counts,
            self.comm_module_operation_counts,
            self.operations_left_out,
        )

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Table of modules, their collectives and their ops, with terminal colours.

        Noise level 0 shows counts of collectives; 1 also modules and non-trivial ops on DTensors; 2 all non-trivial
        ops; 3 all ops.
        """
        return self._report().table(noise_level)

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the module tree, with counts and ops of each module, to a file. Noise levels are those of the table."""
        with Path(file_name).open("w") as file:
            json.dump(self._report().json(noise_level), file, indent=4)

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Write the table to a file, without colours."""
        Path(file_name).write_text(_COLOUR.sub("", self.generate_comm_debug_tracing_table(noise_level)))

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"


def _of_module(counts: Counts, name: str) -> dict[str, defaultdict[Any, int]]:
    found = counts.get(name)
    if found is None:
        found = counts[name] = {"forward": defaultdict(int), "backward": defaultdict(int)}
    return found


def _operation(func: Any, args: Any, in_backward: bool, again: bool) -> Operation:
    dtensors = [argument for argument in args if isinstance(argument, torch_private.DTensor)]
    return {
        "name": func,
        "input_shape": [tensor.shape for tensor in dtensors],
        "input_sharding": [tensor.placements for tensor in dtensors],
        "device_mesh": str(dtensors[-1].device_mesh) if dtensors else "",
        "is_bw": in_backward,
        "is_activation_checkpointing": again,
    }


torch_private.skip_in_compiler(CommDebugMode.__torch_dispatch__)
torch_private.skip_in_compiler(CommDebugMode._see)  # noqa: SLF001  own sink, by name
