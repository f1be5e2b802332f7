"""Trains the model on four ranks: tensor parallel over two, FSDP2 over the other two. Run it with torchrun."""

import os
import time

import torch
import torch.distributed as dist
from model import Model, split_weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

STEPS = int(os.environ.get("STEPS", "12"))
WIDTH, LAYERS, BATCH, LENGTH = 64, 4, 4, 32


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model(WIDTH, LAYERS)
    split_weights(model, mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(STEPS):
        batch = torch.randn(BATCH, LENGTH, WIDTH)
        x = DTensor.from_local(batch, mesh["tp"], [Replicate()], run_check=False)
        loss = model(x).to_local().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}/{STEPS}: loss {loss.item():.4f}", flush=True)
    # gloo's threads drop their last tensors a moment after a collective; torch aborts when Python ends meanwhile.
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
