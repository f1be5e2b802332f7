"""Says what a Python frame's code means to the recorder: a module call, the autograd engine, an optimizer, user code.

Classified once per code object by file and function name, so that neither DTensor nor FSDP is imported or patched.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import sysconfig
from pathlib import Path
from types import CodeType

import torch

OTHER = 0
USER = 1
MODULE_CALL = 2
BACKWARD = 3
OPTIMIZER = 4
CLIP = 5
CHECKPOINT = 6
REDISTRIBUTE = 7
DISPATCH = 8
FSDP_GROUP = 9
DTENSOR = 10
NODE = 11
FSDP1 = 12
PIPELINE = 13
GRAPH = 14
INDUCTOR = 15
RECOMPUTE = 16
COMPILED_NODE = 17

_TORCH = str(Path(torch.__file__).parent) + os.sep
_AGENT = str(Path(__file__).parent.parent) + os.sep
_STDLIB = tuple({sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep})
_PACKAGES = f"{os.sep}site-packages{os.sep}"

_BY_FUNCTION = {
    ("nn/modules/module.py", "_call_impl"): MODULE_CALL,
    ("autograd/graph.py", "_engine_run_backward"): BACKWARD,
    ("utils/checkpoint.py", "backward"): RECOMPUTE,
    ("utils/checkpoint.py", "recompute_fn"): RECOMPUTE,
    ("autograd/function.py", "apply"): NODE,
    ("autograd/function.py", "apply_boxed"): NODE,
    ("_functorch/_aot_autograd/runtime_wrappers.py", "forward"): COMPILED_NODE,
    ("distributed/pipelining/schedules.py", "_batch_p2p"): PIPELINE,
    ("optim/optimizer.py", "wrapper"): OPTIMIZER,
    ("distributed/tensor/_redistribute.py", "redistribute_local_tensor"): REDISTRIBUTE,
    ("distributed/tensor/_dispatch.py", "redistribute_local_args"): DISPATCH,
    ("distributed/fsdp/fully_sharded_data_parallel.py", "clip_grad_norm_"): CLIP,
}
_BY_FILE = {
    "nn/utils/clip_grad.py": CLIP,
    "distributed/fsdp/_fully_shard/_fsdp_param_group.py": FSDP_GROUP,
    "distributed/fsdp/_runtime_utils.py": FSDP1,
    "distributed/fsdp/_flat_param.py": FSDP1,
    "distributed/fsdp/_state_dict_utils.py": CHECKPOINT,
    "distributed/fsdp/_optim_utils.py": CHECKPOINT,
    "distributed/_state_dict_utils.py": CHECKPOINT,
    "distributed/tensor/_dispatch.py": DTENSOR,
    "distributed/tensor/parallel/loss.py": DTENSOR,
}


def _classify(code: CodeType) -> int:
    path = code.co_filename
    if path.startswith(_TORCH):
        inside = path[len(_TORCH) :].replace(os.sep, "/")
        found = _BY_FUNCTION.get((inside, code.co_name)) or _BY_FILE.get(inside)
        if found is None and inside.startswith("distributed/checkpoint/"):
            return CHECKPOINT
        return found or OTHER
    if path.startswith("<eval_with_key>"):
        return GRAPH if code.co_name == "forward" else OTHER
    if "torchinductor" in path:
        return INDUCTOR if code.co_name == "call" else OTHER
    return USER if of_user(path) else OTHER


def of_user(path: str) -> bool:
    """Whether a file is the user's: neither torch's nor the agent's, the standard library's or generated."""
    if path.startswith((_TORCH, _AGENT, "<frozen", "<string>", "<eval_with_key>")) or "torchinductor" in path:
        return False
    return not path.startswith(_STDLIB) or _PACKAGES in path


def raised_by_signal(error: BaseException) -> bool:
    """Whether a signal handler of the program raised it while the recorder ran, such as that of a time limit.

    Such an exception belongs to the program and must reach it; anything else is the recorder's.
    """
    handlers = {_handler_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _handler_code(handler: object) -> CodeType | None:
    if isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None)
    if code is None and callable(handler):
        code = getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


class Codes:
    """Meanings by ``id(code)``; holds the code objects, so that an id is never reused for another code.

    A code object's own hash compares its whole content and is too slow for a path that runs at every collective.
    """

    __slots__ = ("_kept", "meanings")

    LIMIT = 100_000
    """Beyond it (a program that generates code for ever) the table starts anew."""

    def __init__(self) -> None:
        self.meanings: dict[int, int] = {}
        self._kept: list[CodeType] = []

    def of(self, code: CodeType) -> int:
        """What a code object means."""
        meaning = self.meanings.get(id(code))
        return self.learn(code) if meaning is None else meaning

    def learn(self, code: CodeType) -> int:
        """Classify a code object that ``meanings`` does not hold yet."""
        if len(self._kept) >= self.LIMIT:
            self.meanings.clear()
            self._kept.clear()
        meaning = _classify(code)
        self._kept.append(code)
        self.meanings[id(code)] = meaning
        return meaning


CLEARABLE_LOCALS = sys.version_info < (3, 13)
"""Before 3.13 ``frame.f_locals`` is a snapshot that stays with the frame and would keep its tensors alive."""
