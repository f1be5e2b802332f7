"""FSDP2 over two blocks and a root: collectives by phase and module, for each reshard_after_forward."""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

from commwatch.agent import record


def main() -> None:
    dist.init_process_group("gloo")
    found = {}
    for name, reshard in {"true": True, "false": False, "default": None}.items():
        torch.manual_seed(0)
        model = Transformer(ModelArgs(dropout_p=0.0))
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        tokens = torch.randint(0, 8, (8, 8))
        model(tokens).sum().backward()
        with record() as r:
            model(tokens).sum().backward()
        found[name] = sorted(
            (phase, kind, module, count)
            for (phase, kind, module), count in Counter((c.phase, c.kind, c.module) for c in r.calls()).items()
        )
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    # gloo's threads drop their last tensors a moment after a collective; torch aborts when Python ends meanwhile.
    time.sleep(0.3)
    dist.destroy_process_group()


main()
