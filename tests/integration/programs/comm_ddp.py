"""DDP and FSDP2 steps under torch's CommDebugMode and ours: the counts of each, by direction."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.nn.parallel import DistributedDataParallel

from commwatch.agent.debug import CommDebugMode


def ddp() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def fsdp2() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def step(make: Callable[[], Any], mode: Any) -> dict[str, dict[str, int]]:
    model = make()
    with mode:
        model(torch.rand(4, 8)).sum().backward()
    counts = mode.comm_module_counts["Global"]
    return {direction: {str(key): count for key, count in found.items()} for direction, found in counts.items()}


def main() -> None:
    dist.init_process_group("gloo")
    found = {
        make.__name__: [step(make, mode()) for mode in (TorchCommDebugMode, CommDebugMode)] for make in (ddp, fsdp2)
    }
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    # gloo's threads drop their last tensors a moment after a collective; torch aborts when Python ends meanwhile.
    time.sleep(0.3)
    dist.destroy_process_group()


main()
