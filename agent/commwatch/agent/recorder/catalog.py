"""What each dispatcher op is: its canonical kind and which arguments hold tensors and the process group."""

from __future__ import annotations

from dataclasses import dataclass

from commwatch.agent.recorder import torch_private

NAMESPACES = ("c10d", "symm_mem")

KINDS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_coalesced_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::reduce_": "reduce",
    "c10d::gather_": "gather",
    "c10d::gather_into_tensor_": "gather",
    "c10d::scatter_": "scatter",
    "c10d::send": "send",
    "c10d::recv_": "recv",
    "c10d::recv_any_source_": "recv",
    "c10d::barrier": "barrier",
    "c10d::monitored_barrier_": "barrier",
    # Symmetric memory never reaches c10d. Its copies and signals between two ranks are no collectives: left out.
    "symm_mem::multimem_all_reduce_": "all_reduce",
    "symm_mem::multimem_one_shot_all_reduce": "all_reduce",
    "symm_mem::multimem_one_shot_all_reduce_out": "all_reduce",
    "symm_mem::one_shot_all_reduce": "all_reduce",
    "symm_mem::one_shot_all_reduce_copy": "all_reduce",
    "symm_mem::one_shot_all_reduce_copy_out": "all_reduce",
    "symm_mem::one_shot_all_reduce_out": "all_reduce",
    "symm_mem::two_shot_all_reduce_": "all_reduce",
    "symm_mem::two_shot_all_reduce_out": "all_reduce",
    "symm_mem::multimem_one_shot_reduce_out": "reduce",
    "symm_mem::tile_reduce": "reduce",
    "symm_mem::multi_root_tile_reduce": "reduce",
    "symm_mem::multimem_all_gather_out": "all_gather",
    "symm_mem::reduce_scatter_out": "reduce_scatter",
    "symm_mem::nccl_reduce_scatter_offset": "reduce_scatter",
    "symm_mem::all_to_all_vdev": "all_to_all",
    "symm_mem::all_to_all_vdev_2d": "all_to_all",
    "symm_mem::all_to_all_vdev_2d_offset": "all_to_all",
    "symm_mem::nvshmem_all_to_all": "all_to_all",
    "symm_mem::nvshmem_broadcast": "broadcast",
}
NOT_COLLECTIVES = frozenset({"c10d::check_for_nan"})

# A barrier's tensor carries a device, not data.
_NO_PAYLOAD = frozenset({"barrier"})


@dataclass(frozen=True, slots=True)
class Op:
    """One dispatcher op. ``inputs`` and ``outputs`` are positions of tensor arguments; ``group`` is -1 when none."""

    name: str
    kind: str
    group: int
    group_is_name: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def describe(op_name: str) -> Op | None:
    """The op behind a dispatcher name; None when it is no collective. An unlisted c10d op is kind ``unknown``."""
    base = op_name.partition(".")[0]
    if base in NOT_COLLECTIVES:
        return None
    kind = KINDS.get(base)
    if kind is None:
        if not base.startswith("c10d::"):
            return None
        kind = "unknown"
    group, group_is_name = -1, False
    inputs: list[int] = []
    outputs: list[int] = []
    for position, (name, type_name) in enumerate(torch_private.schema_arguments(op_name)):
        if "ProcessGroup" in type_name:
            group = position
        elif name == "group_name":
            group, group_is_name = position, True
        elif "Tensor" in type_name and kind not in _NO_PAYLOAD:
            if name == "sparse_indices" or "split" in name:
                continue
            if name.startswith("out") or kind == "recv":
                outputs.append(position)
            else:
                inputs.append(position)
                if name.startswith("tensor") and kind != "send":
                    outputs.append(position)
    if not outputs and kind not in {"send", "barrier"}:
        outputs = list(inputs)
    return Op(base, kind, group, group_is_name, tuple(inputs), tuple(outputs))


def all_ops() -> list[tuple[str, Op]]:
    """(dispatcher name, op) of every collective this torch knows. Never a closed list."""
    described = ((name, describe(name)) for name in torch_private.op_names(NAMESPACES))
    return [(name, op) for name, op in described if op is not None]
