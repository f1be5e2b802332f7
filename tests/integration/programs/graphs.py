"""Four steps of three collectives, the last of them captured into a graph; then six steps that replay it.

No GPU is needed: whether a capture is under way is said here instead of by CUDA, and a replay is what it is for Python,
nothing that a recorder could see.
"""

import torch
import torch.distributed as dist

from commwatch.agent import step
from commwatch.agent.recorder import torch_private

capturing = False


def collectives() -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(2))


dist.init_process_group("gloo")
setattr(torch_private, "enters_graph", lambda _tensor: capturing)  # noqa: B010  a plain assignment has another type
for _ in range(3):
    collectives()
    step()
capturing = True
collectives()
capturing = False
step()
for _ in range(6):
    step()
dist.destroy_process_group()
