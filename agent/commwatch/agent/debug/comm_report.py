"""The tracing table and the JSON tree of CommDebugMode, in torch's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRIVIAL_OPS = frozenset(
    {
        "aten.detach.default",
        "aten.t.default",
        "aten.view.default",
        "aten._to_copy.default",
        "aten.as_strided.default",
        "aten.transpose.int",
    }
)
_COLLECTIVE = "\033[1;33m"
_DETAIL = "\033[1;31m"
_END = "\033[0m"

Operation = dict[str, Any]
Counts = Mapping[str, Mapping[str, Mapping[Any, int]]]


@dataclass(frozen=True, slots=True)
class Noise:
    """What a noise level shows.

    0: counts of collectives. 1: modules and non-trivial ops on DTensors as well. 2: non-trivial ops. 3: all ops.
    """

    level: int

    @property
    def modules(self) -> bool:
        """Whether module types and parameters are shown."""
        return self.level > 0

    def of(self, operations: list[Operation]) -> list[Operation]:
        """The operations this level shows."""
        if self.level <= 0:
            return []
        if self.level == 1:
            operations = [operation for operation in operations if operation["input_shape"]]
        if self.level <= 2:
            operations = [operation for operation in operations if str(operation["name"]) not in TRIVIAL_OPS]
        return operations


@dataclass(frozen=True, slots=True)
class Report:
    """What was counted and listed, by module name; ``tree`` gives each module's data, ``children`` the names below."""

    tree: Mapping[str, Mapping[str, Any]]
    children: Mapping[str, list[str]]
    counts: Counts
    operations: Mapping[str, Mapping[str, list[Operation]]]
    left_out: Mapping[str, int]

    def _passes(self, name: str) -> tuple[list[Operation], list[Operation], list[Operation]]:
        """Operations of forward, of backward, and of forwards run again for backward."""
        listed = self.operations.get(name, {}).get("operations_list", [])
        again = [operation for operation in listed if operation["is_activation_checkpointing"]]
        forward = [operation for operation in listed if not operation["is_bw"]]
        backward = [o for o in listed if o["is_bw"] and not o["is_activation_checkpointing"]]
        return forward, backward, again

    def table(self, noise_level: int) -> str:
        """The table, with terminal colours."""
        noise = Noise(noise_level)
        return "".join("".join(f"{line}\n" for line in self._section(name, noise)) for name in list(self.tree))

    def _section(self, name: str, noise: Noise) -> list[str]:
        data = self.tree[name]
        indent = "    " * data["depth"]
        lines = [f"{indent}{name}"]
        if noise.modules:
            if "module_type" in data:
                lines.append(f"{indent}*module type: {data['module_type']}")
            if "parameters" in data:
                lines.append(f"{indent}*Parameter List")
                lines += [f"{indent} *{parameter}: {placement}" for parameter, placement in data["parameters"].items()]
        counts = self.counts.get(name, {})
        listed = self._passes(name)
        titles = ("FORWARD PASS", "BACKWARD PASS", "ACTIVATION CHECKPOINTING")
        collectives: tuple[Mapping[Any, int], ...] = (counts.get("forward", {}), counts.get("backward", {}), {})
        for title, counted, operations in zip(titles, collectives, listed, strict=True):
            if counted or (operations and noise.level > 0):
                lines.append(f"{indent}  {title}")
                lines += [f"{_COLLECTIVE}{indent}    *{key}: {count}{_END}" for key, count in counted.items()]
                for operation in noise.of(operations):
                    lines += _operation_lines(operation, indent)
        if noise.level > 0 and self.left_out.get(name):
            lines.append(f"{indent}  {self.left_out[name]} operations left out")
        return lines

    def json(self, noise_level: int) -> dict[str, Any]:
        """The module tree as JSON-ready values."""
        return self._node("Global", Noise(noise_level))

    def _node(self, name: str, noise: Noise) -> dict[str, Any]:
        data = self.tree[name]
        counts = self.counts.get(name, {})
        forward, backward, again = (noise.of(operations) for operations in self._passes(name))
        node: dict[str, Any] = {
            "fqn": name,
            "module_type": data.get("module_type", "") if noise.modules else "",
            "parameters": list(data.get("parameters", {}).items()) if noise.modules else [],
            "children": [],
            "collectives_forward": [(str(key), count) for key, count in counts.get("forward", {}).items()],
            "collectives_backward": [(str(key), count) for key, count in counts.get("backward", {}).items()],
            "operations_forward": [_operation_json(operation) for operation in forward],
            "operations_backward": [_operation_json(operation) for operation in backward],
            "operations_checkpointing": [_operation_json(operation) for operation in again],
        }
        if noise.level > 0 and self.left_out.get(name):
            node["operations_left_out"] = self.left_out[name]
        node["children"] = [self._node(child, noise) for child in self.children.get(name, [])]
        return node


def _operation_lines(operation: Operation, indent: str) -> list[str]:
    lines = [f"{_COLLECTIVE}{indent}    **{operation['name']}{_END}"]
    if operation["input_shape"]:
        for title, key in (("shape", "input_shape"), ("sharding", "input_sharding"), ("device mesh", "device_mesh")):
            lines.append(f"{_DETAIL}{indent}      {title}: {operation[key]}{_END}")
    return lines


def _operation_json(operation: Operation) -> dict[str, Any]:
    return {
        **operation,
        "name": str(operation["name"]),
        "input_shape": [str(shape) for shape in operation["input_shape"]],
        "input_sharding": [str(placements) for placements in operation["input_sharding"]],
    }
