"""Phase and module of DDP, pipelines and distributed checkpoints on real ranks; writes <out>/<rank>.json."""

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from commwatch.agent import record

dist: Any = torch.distributed  # its groups and checkpoints have no complete stubs
dcp: Any = torch.distributed.checkpoint


def rows(recorded: record) -> list[list[object]]:
    counts = Counter((call.phase, call.kind, call.module) for call in recorded.calls())
    return sorted([*key, count] for key, count in counts.items())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        y: torch.Tensor = self.norm(x)
        return y


def data_parallel() -> dict[str, object]:
    """One bucket; the buffers of the norm are broadcast before every forward."""
    model = DistributedDataParallel(Blocks())
    model(torch.randn(4, 8)).sum().backward()
    before = dist.group.WORLD._get_sequence_number_for_group()
    with record() as recorded:
        model(torch.randn(4, 8)).sum().backward()
    return {"rows": rows(recorded), "counted": dist.group.WORLD._get_sequence_number_for_group() - before}


def pipeline(schedule_class: type, rank: int) -> dict[str, object]:
    torch.manual_seed(0)
    stage = PipelineStage(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), rank, 2, torch.device("cpu"))
    schedule = schedule_class(stage, 4, loss_fn=nn.MSELoss())
    batch = torch.randn(8, 16)

    def run() -> list[float]:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=losses)
        return [float(loss) for loss in losses]

    plain = run()
    with record() as recorded:
        again = run()
    return {"rows": rows(recorded), "equal": plain == again}


def checkpoint() -> dict[str, object]:
    """Whatever is sent to save and load is in its own phase, a gather of whole parameters too."""
    model: Any = fully_shard(Blocks())
    model(torch.randn(4, 8)).sum().backward()
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder)
    with record() as recorded:
        state = get_model_state_dict(model)
        dcp.save(state, checkpoint_id=folder[0])
        dcp.load(state, checkpoint_id=folder[0])
        set_model_state_dict(model, state)
    return {"phases": sorted({call.phase for call in recorded.calls()}), "calls": len(recorded.calls())}


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {
        "ddp": data_parallel(),
        "gpipe": pipeline(ScheduleGPipe, rank),
        "1f1b": pipeline(Schedule1F1B, rank),
        "checkpoint": checkpoint(),
    }
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    # gloo's threads drop their last tensors a moment after a collective; torch aborts when Python ends meanwhile.
    time.sleep(0.3)
    dist.destroy_process_group()


main()
