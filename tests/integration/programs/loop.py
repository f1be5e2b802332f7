"""A data-parallel loop whose every step is exactly known: one all_reduce of the gradient in a hook, one of the loss.

Options by environment: STEPS, LENGTHS=1 (another sequence length at every step), WAIT_FILE (after half of the steps,
wait until that file exists), DIE_RANK (that rank kills itself after half of the steps), EXTRA (see ``extras``).
Writes <out>/<rank>.json at its end.
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = int(os.environ.get("STEPS", "8"))
EXTRA = os.environ.get("EXTRA", "")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if EXTRA == "reuse":
            y = self.linear(y)
        with torch.no_grad():
            dist.all_reduce(y)
        return y


def fail(_: torch.Tensor) -> None:
    """Raise what the caller catches."""
    raise ArithmeticError("on purpose")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if EXTRA == "caught":
            with contextlib.suppress(ArithmeticError):
                fail(self.layer(x))
        y: torch.Tensor = self.layer(x)
        if EXTRA == "reuse":
            y = self.layer(y)
        return y


def wait_for(path: str) -> None:
    """Block until the file exists, watching its folder by polling a file descriptor with a deadline."""
    for _ in range(1200):
        if Path(path).exists():
            return
        select.select([], [], [], 0.05)
    raise TimeoutError(path)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(0)
    if EXTRA == "workers":
        data = TensorDataset(torch.randn(STEPS * 4, 8))
        return [batch for (batch,) in DataLoader(data, batch_size=4, num_workers=2)]
    lengths = range(4, 4 + STEPS) if os.environ.get("LENGTHS") else [4] * STEPS
    return [torch.randn(length, 8) for length in lengths]


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step, batch in enumerate(batches()):
        if step == STEPS // 2:
            (out / f"half-{rank}").touch()
            if os.environ.get("WAIT_FILE"):
                wait_for(os.environ["WAIT_FILE"])
            if os.environ.get("DIE_RANK") == str(rank):
                os.kill(os.getpid(), signal.SIGKILL)
        loss = model(batch).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if EXTRA == "thread":
            worker = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
            worker.start()
            worker.join()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    facts = {
        "losses": losses,
        "grpc": "grpc" in sys.modules,
        "agent": sorted(name for name in sys.modules if name.startswith("commwatch")),
    }
    (out / f"{rank}.json").write_text(json.dumps(facts))
    # gloo's threads drop their last tensors a moment after a collective; torch aborts when Python ends meanwhile.
    time.sleep(0.3)
    dist.destroy_process_group()


main()
