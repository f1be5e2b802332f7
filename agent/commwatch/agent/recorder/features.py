"""What of the agent needs which private torch API, and what happens on a torch without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from commwatch.agent.recorder import torch_private


def _of_debug_mode() -> list[str]:
    from commwatch.agent.debug import torch_private as private

    return private.missing()


def _of_comm_debug_mode() -> list[str]:
    from commwatch.agent.debug import torch_private as private

    return torch_private.missing() + private.missing_for_counts()


@dataclass(frozen=True, slots=True)
class Feature:
    """``without`` is a clause about a torch that lacks one of the ``needs``: names of ``torch_private.PROBES``.

    ``probe``, where there is one, says instead what is lacking.
    """

    name: str
    needs: tuple[str, ...]
    without: str
    probe: Callable[[], list[str]] | None = None

    def lacking(self) -> list[str]:
        """Names of the APIs this torch does not have; empty when the feature works."""
        return torch_private.lacks(self.needs) if self.probe is None else self.probe()


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
    Feature(
        "self-test", ("torch._C._distributed_c10d.FakeProcessGroup",), "recording starts without having proved itself"
    ),
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
    Feature(
        "CUDA graphs",
        ("torch.cuda.is_current_stream_capturing",),
        "a collective in a CUDA graph looks like one that ran once",
    ),
)
"""Every feature of the recorder that private API decides about. The others stand on the first."""

OP_LEVEL = Feature("op level", (), "collectives are recorded but no step is captured op by op", _of_debug_mode)
"""``COMMWATCH_LEVEL=ops``, ``COMMWATCH_CAPTURE_STEPS`` and ``commwatch capture``."""

OP_FEATURES = (
    OP_LEVEL,
    Feature("`DebugMode`", (), "`DebugMode` raises DebugModeError", _of_debug_mode),
    Feature("`CommDebugMode`", (), "`CommDebugMode` raises RecordError", _of_comm_debug_mode),
)
"""Features that run op by op. To ask for them loads DTensor, which a job may do without."""

FOR_CAPTURES = (*FEATURES, OP_LEVEL)
"""What a job needs that is to capture steps."""

EVERY = FEATURES + OP_FEATURES


def reduced(features: Iterable[Feature] = FEATURES) -> list[tuple[Feature, list[str]]]:
    """Features this torch cannot give, each with the APIs it lacks."""
    return [(feature, absent) for feature in features if (absent := feature.lacking())]


def reduced_text(features: Iterable[Feature] = FEATURES) -> str:
    """One line about what goes without; empty when nothing does."""
    return "; ".join(f"without {', '.join(absent)} {feature.without}" for feature, absent in reduced(features))
