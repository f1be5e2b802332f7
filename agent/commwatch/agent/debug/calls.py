"""The records of a recording: structured, small, rendered when somebody reads them.

Each extends torch's record of the same meaning, so that code written for torch's ``DebugMode`` finds the attributes and
types it knows (``op``, ``call_depth``, ``args_str``, ``log``, ``record``, ``stack_trace``, ``render``).
"""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from commwatch.agent.debug import torch_private as private
from commwatch.agent.debug.snapshot import TensorFacts, Text, complete
from commwatch.agent.debug.stacks import LazyStack

_UNSET: Any = object()


def _all_none(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, (list, tuple)):
        return all(_all_none(item) for item in value)
    if isinstance(value, dict):
        return all(_all_none(item) for item in value.values())
    return False


def _as_text(value: Any) -> Any:
    """Every leaf as text, in the containers it stands in: how torch shows outputs."""
    if isinstance(value, (TensorFacts, Text)):
        return str(value)
    if type(value) in (list, tuple):
        return type(value)(_as_text(item) for item in value)
    return pytree.tree_map(str, value)


class Stacks:
    """Where a record was made: ``stack_trace``, and in backward ``fwd_stack_trace``. Absent unless asked for."""

    __slots__ = ()

    stack: Any
    forward_stack: Any

    @property
    def stack_trace(self) -> str:
        """The Python stack; AttributeError when stacks are not recorded, as with torch's records."""
        if self.stack is None:
            raise AttributeError("stack_trace")
        return self.stack if isinstance(self.stack, str) else self.stack.text()

    @stack_trace.setter
    def stack_trace(self, text: str) -> None:
        self.stack = text

    @property
    def fwd_stack_trace(self) -> str | None:
        """The stack of the forward op behind a backward op; None in forward."""
        if self.stack is None:
            raise AttributeError("fwd_stack_trace")
        if self.forward_stack is None:
            return None
        return self.forward_stack if isinstance(self.forward_stack, str) else self.forward_stack.text()

    @fwd_stack_trace.setter
    def fwd_stack_trace(self, text: str | None) -> None:
        self.forward_stack = text


class Extras:
    """What few records have: results of hooks, stacks, the arguments themselves."""

    __slots__ = ("forward_stack", "log", "original", "record", "stack")

    def __init__(self) -> None:
        self.log: dict[str, Any] | None = None
        self.record: dict[str, Any] | None = None
        self.original: tuple[Any, Any] | None = None
        self.stack: LazyStack | str | None = None
        self.forward_stack: LazyStack | str | None = None


_NONE = Extras()


def _extra(name: str) -> property:
    def get(call: OpCall) -> Any:
        return getattr(call.extras, name)

    def put(call: OpCall, value: Any) -> None:
        if call.extras is _NONE:
            call.extras = Extras()
        setattr(call.extras, name, value)

    return property(get, put)


class OpCall(Stacks, private.OpCall):  # type: ignore[misc]  # torch's class is Any to the type checker
    """An op or a torch function. ``kind`` is one of the wire's captured kinds, in lower case.

    ``place`` is where the program issued it and what it communicated, in a capture.
    """

    __slots__ = ("call_depth", "extras", "keywords", "kind", "op", "output", "place", "values")

    log = _extra("log")
    record = _extra("record")
    original = _extra("original")
    stack = _extra("stack")
    forward_stack = _extra("forward_stack")

    def __init__(
        self, op: Any, kind: str, values: tuple[Any, ...], keywords: dict[str, Any] | None, depth: int
    ) -> None:
        self.op = op
        self.kind = kind
        self.values = values
        self.keywords = keywords
        self.call_depth = depth
        self.output: Any = _UNSET
        self.extras = _NONE
        self.place: Any = None

    @property
    def name(self) -> str:
        """The op's name, such as ``aten::mm`` or ``torch.mm``."""
        if isinstance(self.op, private.Operator):
            name: str = self.op.__qualname__
            return name
        if hasattr(self.op, "__module__") and hasattr(self.op, "__name__"):
            return f"{self.op.__module__}.{self.op.__name__}"
        return str(self.op)

    @property
    def args(self) -> Any:
        """The arguments themselves; AttributeError unless ``store_original_args``."""
        if self.original is None:
            raise AttributeError("args")
        return self.original[0]

    @property
    def kwargs(self) -> Any:
        """The keyword arguments themselves; AttributeError unless ``store_original_args``."""
        if self.original is None:
            raise AttributeError("kwargs")
        return self.original[1]

    @property
    def args_str(self) -> str:
        """The arguments as text."""
        return ", ".join([str(value) for value in self.values])

    @property
    def kwargs_str(self) -> str:
        """The keyword arguments as text, with a comma before them."""
        if not self.keywords:
            return ""
        return ", " + ", ".join([f"{name}={value}" for name, value in self.keywords.items()])

    @property
    def output_str(self) -> str | None:
        """The outputs as text; None when there are none."""
        if self.output is _UNSET or _all_none(self.output):
            return None
        return f"  ->  {_as_text(self.output)}"

    @property
    def has_output(self) -> bool:
        """Whether the outputs were recorded."""
        return self.output is not _UNSET

    def stringify_args(self, attributes: list[str], tensor_memo: Any = None) -> None:
        """Nothing to do: text is made when it is read."""

    def render_complete(self) -> str:
        """The line with what torch's leaves out: process groups and meshes."""
        arguments = [complete(value) for value in self.values]
        arguments += [f"{name}={complete(value)}" for name, value in (self.keywords or {}).items()]
        output = "" if self.output_str is None else f"  ->  {complete(self.output)}"
        return f"{self.name}({', '.join(arguments)}){output}" + (f"  # {self.log}" if self.log else "")


class RedistributeCall(Stacks, private.RedistributeCall):  # type: ignore[misc]  # as above
    """A redistribute: DTensor's decision for an op's argument (``arg`` is its index), or the one that follows."""

    __slots__ = (
        "call_depth",
        "dst",
        "forward_stack",
        "is_explicit",
        "is_outer_call",
        "log",
        "place",
        "record",
        "src",
        "stack",
        "transform_info_str",
        "value",
    )

    kind = "redistribute"
    output_str = None

    def __init__(self, value: Any, src: Any, dst: Any, trace: str | None, depth: int, *, explicit: bool) -> None:
        self.value = value
        self.src = src
        self.dst = dst
        self.transform_info_str = trace
        self.call_depth = depth
        self.is_explicit = explicit
        self.is_outer_call = isinstance(value, int)
        self.record = self.log = self.stack = self.forward_stack = self.place = None

    @property
    def arg_str(self) -> str:
        """The argument's index or the tensor, as text."""
        return str(self.value)

    @property
    def src_placement(self) -> str:
        """Placements before, as text."""
        return str(self.src)

    @property
    def dst_placement(self) -> str:
        """Placements after, as text."""
        return str(self.dst)

    def stringify_args(self, attributes: list[str], tensor_memo: Any = None) -> None:
        """Nothing to do: text is made when it is read."""

    def render_complete(self) -> str:
        """As ``render``: the collectives below it say on which group."""
        text: str = self.render([])
        return text


class OutputPlacementCall(private.OutputPlacementCall):  # type: ignore[misc]  # as above
    """The placements DTensor chose for an op's output."""

    __slots__ = ("call_depth", "log", "output_str", "place", "placements_str", "record")

    kind = "output_placements"

    def __init__(self, placements: str, depth: int) -> None:
        self.placements_str = placements
        self.call_depth = depth
        self.record = self.log = self.output_str = self.place = None

    def render_complete(self) -> str:
        """As ``render``."""
        return f"-> output: {self.placements_str}"


class KernelCall(private.TritonKernelCall):  # type: ignore[misc]  # as above
    """A Triton kernel that inductor launches. ``keywords`` are its arguments by name."""

    kind = "triton_kernel"

    def __init__(self, kernel_name: str, kwargs: dict[str, Any], depth: int) -> None:
        super().__init__(kernel_name, kwargs, depth)
        self.keywords: dict[str, Any] = {}
        self.place: Any = None

    def render_complete(self) -> str:
        """As ``render``."""
        text: str = self.render([])
        return text


class AnnotateCall(Stacks, private.AnnotateCall):  # type: ignore[misc]  # as above
    """A module's entry, a ``record_function`` range, a user's annotation or the edge of a compiled region."""

    __slots__ = (
        "call_depth",
        "forward_stack",
        "header",
        "kind",
        "log",
        "output_str",
        "place",
        "record",
        "stack",
        "tag",
    )

    def __init__(self, tag: Any, header: str, kind: str, depth: int) -> None:
        self.tag = tag
        self.header = header
        self.kind = kind
        self.call_depth = depth
        self.record = self.log = self.output_str = self.stack = self.forward_stack = self.place = None

    def render_complete(self) -> str:
        """As ``render``."""
        return f"[{self.header}] {self.tag}"
