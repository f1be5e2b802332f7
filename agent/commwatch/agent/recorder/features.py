"""What of the recorder needs which private torch API, and what happens on a torch without it."""

from __future__ import annotations

from dataclasses import dataclass

from commwatch.agent.recorder import torch_private


@dataclass(frozen=True, slots=True)
class Feature:
    """``needs`` are names of ``torch_private.PROBES``; ``without`` is a clause about a torch that lacks one."""

    name: str
    needs: tuple[str, ...]
    without: str


COLLECTIVES = Feature(
    "collectives",
    (
        "torch.distributed",
        "torch._C._dispatch_keyset_full_after",
        "OperatorHandle.redispatch_boxed (torch >= 2.9)",
        "torch._C._dispatch_get_all_op_names",
        "torch.distributed.ProcessGroup.unbox",
    ),
    "nothing is recorded",
)

FEATURES = (
    COLLECTIVES,
    Feature(
        "start with the first process group",
        ("torch.distributed.distributed_c10d._new_process_group_helper",),
        "a job is not recorded by itself; `with record()` works",
    ),
    Feature("self-test", ("FakeProcessGroup._create_internal",), "recording starts without having proved itself"),
    Feature(
        "backward and recompute on threads of the autograd engine",
        ("torch._C._current_autograd_node",),
        "collectives issued there are in phase other",
    ),
    Feature(
        "module in backward",
        ("torch._C._current_autograd_node", "torch._C._autograd._get_sequence_nr", "Node._sequence_nr"),
        "collectives in backward have no module, FSDP's and DDP's excepted",
    ),
    Feature(
        "completeness",
        (
            "ProcessGroup._get_sequence_number_for_group",
            "torch.distributed.distributed_c10d._world.pg_map",
        ),
        "no collective is verified against a second source",
    ),
    Feature("names of mesh dimensions", ("DeviceMesh.get_group",), "groups are known by their description"),
    Feature(
        "torch.compile leaves the recorder's own functions alone",
        ("torch._C._dynamo.eval_frame.set_code_exec_strategy",),
        "a job that compiles modules counts a few more compiled frames",
    ),
    Feature(
        "module and line in compiled regions",
        ("torch._inductor.codecache.PyCodeCache.linemaps",),
        "collectives inside inductor's code have no module",
    ),
)
"""Every feature that private API decides about. The first is the one that the others stand on."""


def reduced() -> list[tuple[Feature, list[str]]]:
    """Features this torch cannot give, each with the APIs it lacks."""
    return [(feature, absent) for feature in FEATURES if (absent := torch_private.lacks(feature.needs))]


def reduced_text() -> str:
    """One line about what goes without; empty when nothing does."""
    return "; ".join(f"without {', '.join(absent)} {feature.without}" for feature, absent in reduced())
