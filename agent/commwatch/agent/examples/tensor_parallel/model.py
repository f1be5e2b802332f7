"""A small gated transformer, written for DTensor: activations and weights carry their layouts."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

# How each weight is split over the tensor-parallel ranks: Shard(0) splits its output features, Shard(1) its inputs.
LAYOUTS = {
    "wq": Shard(0),
    "wv": Shard(0),
    "wo": Shard(1),
    "w1": Shard(0),
    "w2": Shard(1),
}


class Block(nn.Module):
    """A gate and a feed-forward part, each with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.wq = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.w1 = nn.Linear(width, 4 * width, bias=False)
        self.w2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.mix(h)
        return x + self.w2(F.gelu(self.w1(self.norm2(x))))

    def mix(self, h: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.wq(h))
        mixed = self.wo(gate * self.wv(h))
        return mixed.redistribute(placements=[Replicate()])


class Model(nn.Module):
    """Blocks and a projection."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def split_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Distribute every parameter over the mesh, as LAYOUTS says."""
    for name, module in model.named_modules():
        layout = LAYOUTS.get(name.rpartition(".")[2], Replicate())
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = layout if parameter.ndim == 2 else Replicate()
            setattr(module, key, nn.Parameter(distribute_tensor(parameter.data, mesh, [placement])))
