"""GPipe, two ranks, four micro-batches: what each rank sends and receives, and its output."""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from commwatch.agent import record


def run(schedule: ScheduleGPipe, rank: int) -> float:
    torch.manual_seed(1)
    batch = torch.randn(8, 16)
    if rank == 0:
        schedule.step(batch)
        return 0.0
    return float(schedule.step(target=batch).sum())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    stage = PipelineStage(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.MSELoss())
    plain = run(schedule, rank)
    with record() as r:
        recorded = run(schedule, rank)
    counts = Counter((call.phase, call.kind) for call in r.calls())
    Path(sys.argv[1], f"{rank}.json").write_text(
        json.dumps({"counts": sorted((*key, count) for key, count in counts.items()), "equal": plain == recorded})
    )
    # gloo's threads drop their last tensors a moment after a collective; torch aborts when Python ends meanwhile.
    time.sleep(0.3)
    dist.destroy_process_group()


main()
