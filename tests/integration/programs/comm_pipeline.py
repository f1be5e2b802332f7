"""GPipe and 1F1B under CommDebugMode, two ranks, four micro-batches: counts of each rank; are results equal?"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from commwatch.agent.debug import CommDebugMode

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def run(schedule: Any, rank: int) -> float:
    torch.manual_seed(1)
    batch = torch.randn(8, 16)
    if rank == 0:
        schedule.step(batch)
        return 0.0
    return float(schedule.step(target=batch).sum())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {}
    for name, kind in SCHEDULES.items():
        torch.manual_seed(0)
        stage = PipelineStage(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), rank, 2, torch.device("cpu"))
        schedule = kind(stage, 4, loss_fn=nn.MSELoss())
        plain = run(schedule, rank)
        with CommDebugMode() as mode:
            counted = run(schedule, rank)
        modules = mode.advanced_module_tracker.parent_dict
        counts = {str(key): count for key, count in mode.get_comm_counts().items()}
        calls = mode.comm_module_operation_counts["Sequential.0"]["operations_list"]
        forwards = [call for call in calls if str(call["name"]) == "aten.addmm.default"]
        found[name] = {"counts": counts, "modules": modules, "equal": plain == counted, "forwards": len(forwards)}
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    # gloo's threads drop their last tensors a moment after a collective; torch aborts when Python ends meanwhile.
    time.sleep(0.3)
    dist.destroy_process_group()


main()
