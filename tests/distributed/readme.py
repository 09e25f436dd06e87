"""README's section on distributed training, run as it stands there."""

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from .data_parallel import mine
from .net import batch, build, gradients, loss_of
from .pipeline import stage_of
from .sharded import COLUMNS_AND_ROWS

README = Path(__file__).parents[2] / "README.md"
_, _, SECTION = README.read_text().partition("\n## Distributed\n")
BLOCKS = dict(re.findall(r"\*\*([\w ]+)\.\*\*[^*]*?```python\n(.*?)```", SECTION.partition("\n## ")[0], re.DOTALL))
"""Code by the bold words before it."""


def block(name):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    stage, _ = stage_of(model, rank, ranks)
    known = {
        "model": model, "stage_module": stage, "rank": rank, "world_size": ranks, "device": torch.device("cpu"),
        "mesh": init_device_mesh("cpu", (ranks,)), "plan": COLUMNS_AND_ROWS, "loss_fn": lambda output, _: loss_of(output),
        "options": {"policy": "int8", "min_bytes": 0, "compiler": "aot_eager", "strict": True}, "torch": torch,
        "DistributedDataParallel": DistributedDataParallel, "fully_shard": fully_shard, "Schedule1F1B": Schedule1F1B,
        "PipelineStage": PipelineStage, "parallelize_module": parallelize_module,
    }  # fmt: skip
    exec(compile(BLOCKS[name], f"README, {name}", "exec"), known)
    if "schedule" in known:
        known["schedule"].step(*[batch()] * (rank == 0), target=batch())
    else:
        x = batch() if "Tensor" in name else mine(batch())
        loss_of(known.get("call", model)(x)).backward()
    return {"gradients": gradients(model)}
