"""What is kept of an op's arguments and outputs: facts, never the tensors.

A plain tensor's facts are shared by every tensor of its element type and shape, so that a step that repeats keeps
nothing new. Text is made when somebody reads it, except where a value could change or hold a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._dtype_abbrs import dtype_abbrs

from commwatch.agent.debug import torch_private as private
from commwatch.agent.recorder.groups import Group

MAX_SHARED = 65_536
MAX_SPECS = 512
"""Specs remembered at once: DTensor makes new ones at every step, and each is held."""

"""Distinct facts shared at once; beyond it the table starts anew."""


class TensorFacts:
    """Type (``t``, ``dt``, ``ft``), element type and shape of a tensor; of a DTensor its placements and mesh shape.

    A symbolic length stands as text. ``number`` counts the tensors of a recording from 0, where ids are recorded.
    """

    __slots__ = ("attributes", "dtype", "mesh", "number", "placements", "shape", "type")

    def __init__(
        self,
        type_: str,
        dtype: str,
        shape: tuple[int | str, ...],
        placements: str | None = None,
        mesh: tuple[int, ...] = (),
        attributes: str = "",
        number: int | None = None,
    ) -> None:
        self.type = type_
        self.dtype = dtype
        self.shape = shape
        self.placements = placements
        self.mesh = mesh
        self.attributes = attributes
        self.number = number

    def __str__(self) -> str:
        """Such as ``dt: f32[8, 8]| S(0)``."""
        number = "" if self.number is None else f"${self.number}"
        lengths = ", ".join([str(length) for length in self.shape])
        text = f"{self.type}{number}: {self.dtype}[{lengths}]{self.attributes}"
        return text if self.placements is None else f"{text}| {self.placements}"

    def numbered(self, number: int) -> TensorFacts:
        """The same facts of one tensor."""
        return TensorFacts(self.type, self.dtype, self.shape, self.placements, self.mesh, self.attributes, number)

    def complete(self) -> str:
        """With the shape of the mesh: ``dt: f32[8, 8]| S(0) on DM(4, 2)``."""
        mesh = f" on DM({', '.join([str(size) for size in self.mesh])})" if self.mesh else ""
        return f"{self}{mesh}"

    def __repr__(self) -> str:
        """In quotes: how it stands in a list."""
        return repr(str(self))


class Text:
    """A value that is kept as text alone."""

    __slots__ = ("_inside", "text")

    def __init__(self, text: str, inside: str) -> None:
        self.text = text
        self._inside = inside

    def __str__(self) -> str:
        """The value's ``str``."""
        return self.text

    def complete(self) -> str:
        """The same."""
        return self.text

    def __repr__(self) -> str:
        """The value's ``repr``: how it stands in a list."""
        return self._inside


class _Quoted(Text):
    """A text that is quoted where it stands in a list."""

    __slots__ = ()

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return repr(self.text)


class _Object(Text):
    """A boxed C++ object: its class's text, and its address for where it stands in a list."""

    __slots__ = ("_address",)

    def __init__(self, value: Any) -> None:
        self.text = str(value)
        self._address = id(value)

    def __repr__(self) -> str:
        return f"<torch.ScriptObject object at {self._address:#x}>"


class GroupText(Text):
    """A process group argument: torch shows an address or a name that counts groups."""

    __slots__ = ("_dimension", "_group", "_name", "_shown")

    def __init__(
        self, text: str, shown: object, group: Group, name: str, dimension: Callable[[str], str | None]
    ) -> None:
        self.text = text
        self._shown = shown
        self._group = group
        self._name = name
        self._dimension = dimension

    @property
    def group(self) -> Group:
        """The group in terms that are equal on every rank, named by the mesh dimension that uses it."""
        return replace(self._group, name=self._dimension(self._name) or self._group.name)

    def complete(self) -> str:
        """Such as ``tp(size 2, stride 1)``."""
        return str(self.group)

    def __repr__(self) -> str:
        return repr(self._shown)


def complete(value: Any) -> str:
    """A snapshot as text, with what torch's rendering leaves out."""
    if isinstance(value, (TensorFacts, Text)):
        return value.complete()
    if isinstance(value, (list, tuple)):
        inner = ", ".join([complete(item) for item in value])
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return str(value)


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_CONSTANT = frozenset(
    {
        int,
        float,
        bool,
        complex,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        *private.PLACEMENTS,
    }
)

_TENSOR, _SPEC, _PLACEMENT, _OTHER = range(1, 5)
_SORTS: dict[type, int] = {}
"""Of types that were met, at most ``MAX_SHARED``: ``isinstance`` runs Python for some of torch's."""


def _learn(value: Any) -> int:
    sort = _OTHER
    if isinstance(value, torch.Tensor):
        sort = _TENSOR
    elif private.is_spec(value):
        sort = _SPEC
    elif private.is_placement(value):
        sort = _PLACEMENT
    if len(_SORTS) < MAX_SHARED:
        _SORTS[type(value)] = sort
    return sort


_SHARED_FACTS: dict[Any, TensorFacts] = {}
"""By what they say, at most ``MAX_SHARED``: one recording after the other meets the same."""


class Snapshots:
    """Takes snapshots. ``attributes`` names attributes of tensors to note; ``numbered`` numbers the tensors."""

    def __init__(self, attributes: tuple[str, ...] = (), *, numbered: bool = False) -> None:
        self._attributes = attributes
        self._numbers = TensorNumbers()
        self._numbered = numbered
        self._simple = not attributes and not numbered
        self._shared = _SHARED_FACTS
        self._specs: dict[int, tuple[Any, Any, Any, str, tuple[int, ...]]] = {}

    def take(self, value: Any) -> Any:
        """Facts of one argument or output; containers are copied, and constants stay as they are."""
        kind = type(value)
        if kind in _PLAIN and not self._attributes:
            try:
                found = self._shared.get((value.dtype, value.shape)) or self._share(value)
            except RuntimeError:
                return _without_shape(value)
            return found if self._simple else found.numbered(self._numbers.of(value))
        if kind in _CONSTANT:
            return value
        if kind is tuple:
            return tuple([self.take(item) for item in value])
        if kind is list:
            if not self._simple:
                return [self.take(item) for item in value]
            known, plain, take = self._shared.get, torch.Tensor, self.take
            try:
                return [(type(item) is plain and known((item.dtype, item.shape))) or take(item) for item in value]
            except RuntimeError:  # a tensor without a shape
                return [take(item) for item in value]
        if kind is torch.ScriptObject:
            return _Object(value)
        return self._other(value)

    def forget(self) -> None:
        """Number tensors from 0 again."""
        self._numbers = TensorNumbers()

    def _share(self, value: Any) -> TensorFacts:
        if len(self._shared) >= MAX_SHARED:
            self._shared.clear()
        found = TensorFacts("t", _dtype(value), _lengths(value.shape))
        self._shared[value.dtype, value.shape] = found
        return found

    def _other(self, value: Any) -> Any:
        sort = _SORTS.get(type(value)) or _learn(value)
        if sort == _TENSOR:
            return self.tensor(value)
        if sort == _SPEC:
            return _Quoted(self._of_spec(value)[0])
        if sort == _PLACEMENT:
            return value
        if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            return _storage(value)
        if pytree.tree_is_leaf(value):
            return as_text(value)
        return pytree.tree_map(self.take, value)

    def tensor(self, value: Any) -> TensorFacts:
        """Facts of a tensor of any type."""
        type_ = "t"
        placements: str | None = None
        mesh: tuple[int, ...] = ()
        if isinstance(value, private.DTensor):
            type_ = "dt"
            placements, mesh = self._of_spec(private.spec_of(value))
        elif isinstance(value, private.FAKE_TENSOR):
            type_ = "ft"
        number = None
        try:
            shape = value.shape
        except RuntimeError:
            return _without_shape(value)
        if self._simple:
            key = (type_, value.dtype, shape, placements, mesh)
            try:
                found = self._shared.get(key)
            except TypeError:  # a symbolic length has no hash
                return TensorFacts(type_, _dtype(value), _lengths(shape), placements, mesh)
            if found is not None:
                return found
        elif self._numbered:
            number = self._numbers.of(value)
        attributes = _attributes(value, self._attributes) if self._attributes else ""
        facts = TensorFacts(type_, _dtype(value), _lengths(shape), placements, mesh, attributes, number)
        if self._simple:
            if len(self._shared) >= MAX_SHARED:
                self._shared.clear()
            self._shared[key] = facts
        return facts

    def _of_spec(self, spec: Any) -> tuple[str, tuple[int, ...]]:
        """Text and mesh shape of a DTensorSpec; specs are shared by many tensors, and may be changed in place."""
        found = self._specs.get(id(spec))
        order = getattr(spec, "shard_order", None)
        if found is None or found[0] is not spec or found[1] is not spec.placements or found[2] is not order:
            if len(self._specs) >= MAX_SPECS:
                self._specs.clear()
            mesh = tuple([int(size) for size in spec.mesh.shape])
            found = (spec, spec.placements, order, _placements_text(spec, order), mesh)
            self._specs[id(spec)] = found
        return found[3], found[4]


_PLACEMENT_TEXTS: dict[Any, str] = {}
"""By placements and shard order, at most ``MAX_SHARED``: many specs share few of them."""


def _placements_text(spec: Any, order: Any) -> str:
    key = (spec.placements, order)
    try:
        text = _PLACEMENT_TEXTS.get(key)
    except TypeError:  # a placement of the program's own need not be hashable
        return private.placements_text(spec)
    if text is None:
        text = private.placements_text(spec)
        if len(_PLACEMENT_TEXTS) < MAX_SHARED:
            _PLACEMENT_TEXTS[key] = text
    return text


def as_text(value: Any) -> Text:
    """A value of which nothing but its text is kept. One that cannot be shown says so."""
    try:
        return Text(str(value), repr(value))
    except Exception as error:  # noqa: BLE001  a user's __str__ may fail, and the job must not
        shown = f"<{type(value).__name__}: {type(error).__name__} in its __str__>"
        return Text(shown, shown)


def _storage(value: Any) -> Text:
    """A storage by its size: its own text lists every element."""
    shown = f"<{type(value).__name__} of {value.nbytes()} bytes on {value.device}>"
    return Text(shown, shown)


def _dtype(tensor: Any) -> str:
    """Short where torch has a short name: it has none for quantized types."""
    return dtype_abbrs.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")


def _without_shape(tensor: Any) -> TensorFacts:
    """A nested tensor of strided layout: each of its dimensions may have many lengths."""
    return TensorFacts("t", _dtype(tensor), ("?",) * tensor.dim())


def _lengths(shape: Any) -> tuple[int | str, ...]:
    return tuple([length if type(length) is int else str(length) for length in shape])


def _attributes(tensor: Any, names: tuple[str, ...]) -> str:
    pairs = [f"{name}={getattr(tensor, name)}" for name in names if hasattr(tensor, name)]
    return f"{{{', '.join(pairs)}}}" if pairs else ""


class TensorNumbers:
    """Numbers tensors in the order they are met, from 0, without keeping them alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._next = 0
        self._tidy_at = 4096

    def of(self, tensor: Any) -> int:
        """The tensor's number; a new one for a tensor that was not met before."""
        identity = id(tensor)
        found = self._known.get(identity)
        if found is not None and found[0]() is tensor:
            return found[1]
        number = self._next
        self._next += 1
        self._known[identity] = (weakref.ref(tensor), number)
        if len(self._known) >= self._tidy_at:
            self._known = {key: entry for key, entry in self._known.items() if entry[0]() is not None}
            self._tidy_at = max(4096, 2 * len(self._known))
        return number
